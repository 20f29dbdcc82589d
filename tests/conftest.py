"""Settings for every tier: hypothesis runs the same examples every time, and CI skips no test of a missing program.

The gate leaves out tests that are marked ``thorough``; ``REPEAT=all`` runs them, too. The limit of a test counts on the
clock of patience.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from support import programs, repeat

pytest_plugins = ["support.patient_limits"]

settings.register_profile(
    "default", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("many", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the long run needs."""
    left_out = [] if repeat.is_thorough() else [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test without its programs (``needs_program``); where the variable CI is set, fail it."""
    needed = [name for mark in item.iter_markers("needs_program") for name in mark.args]
    if not (problem := programs.missing(needed)):
        return
    if os.environ.get("CI"):
        pytest.fail(f"{problem}, and continuous integration skips no tests", pytrace=False)
    pytest.skip(problem)
