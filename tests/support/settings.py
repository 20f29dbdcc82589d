"""pytest plugin: settings for every tier. The gate's examples are the same every time, and CI skips no test.

The gate leaves out tests that are marked ``thorough``. ``REPEAT=all`` runs them, too, and hypothesis draws anew. The
limit of a test counts on the clock of patience, and is shorter where a test only computes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import programs, repeat

pytest_plugins = ["support.accounting", "support.patient_limits"]
ROOT = Path(__file__).parents[2]

settings.register_profile(
    "project",
    derandomize=not repeat.is_thorough(),
    print_blob=True,
    max_examples=repeat.times(gate=40, every=2000),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("project")
repeat.choose_seed()


COMPUTES = tuple(
    ROOT / folder
    for folder in (
        "research/tests",
        "tests/shell",
        *(f"tests/unit/{name}" for name in ("core", "planner", "operator", "cli", "docs", "skew")),
    )
)
"""Folders of tests without processes that they wait for, besides a few commands."""
LIMIT_S = repeat.times(gate=60, every=7200)


SOURCES = tuple(
    f"{ROOT / name}{os.sep}" for name in ("core", "planner", "operator", "trainer", "cli", "research", "tests")
)


def _keep_sources(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse to write a file among the sources, which tests beside it list and count."""
    if event != "open":
        return
    path, _, flags = arguments
    if not isinstance(path, str) or not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if path.startswith(SOURCES) and "__pycache__" not in path:
        raise PermissionError(f"{path}: a test writes into the sources, which others count: use tmp_path")


sys.addaudithook(_keep_sources)


def pytest_report_header() -> str:
    """Name the seed of a long run."""
    return f"{repeat.VARIABLE}={repeat.ALL} {repeat.SEED}={os.environ[repeat.SEED]}" if repeat.is_thorough() else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the limit of tests that compute, and leave out what only the long run needs."""
    for item in items:
        if any(folder in item.path.parents for folder in COMPUTES):
            item.add_marker(pytest.mark.timeout(LIMIT_S))
    if repeat.is_thorough():
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test without its programs (``needs_program``); where the variable CI is set, fail it."""
    needed = [name for mark in item.iter_markers("needs_program") for name in mark.args]
    if not (problem := programs.missing(needed)):
        return
    if os.environ.get("CI"):
        pytest.fail(f"{problem}, and continuous integration skips no tests", pytrace=False)
    pytest.skip(problem)  # names the missing program and what installs it
