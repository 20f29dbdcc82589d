"""CI runs what `make test` leaves out, on every supported Python, and no missing program skips a test there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from lab.testing.parts import PARTS

ROOT = Path(__file__).parents[2]
JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]
TEST = """
import pytest

@pytest.mark.needs_program("sh")
def test_with_a_program():
    pass

@pytest.mark.needs_program("sh", "no-such-program")
def test_without_one():
    raise AssertionError("it ran")
"""


@pytest.mark.parametrize(("ci", "code", "outcome"), [("", 0, "1 passed, 1 skipped"), ("true", 1, "1 passed, 1 error")])
def test_a_missing_program_skips_a_test_and_fails_it_in_ci(tmp_path: Path, ci: str, code: int, outcome: str) -> None:
    (tmp_path / "test_programs.py").write_text(TEST)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "support.settings", tmp_path / "test_programs.py"],
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT / "tests")},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, outcome in done.stdout) == (code, True), done.stdout + done.stderr
    assert "no-such-program not found: run `make images` once" in done.stdout


def test_ci_runs_every_part_that_needs_no_device() -> None:
    steps = [step.get("run", "") for job in JOBS.values() for step in job["steps"]]
    asked = [value for run in steps for value in re.findall(r"^make test(?:-all)? PART=(\S+|\"[^\"]+\")$", run)]
    called = {name for value in asked for name in value.strip('"').split()}
    by_hand = {"heavy", "chaos", "oldest-torch", "coscheduling", "kueue", "cluster"}
    """A choice of other parts' tests, hours, 6 GB of packages, and programs of the emulated cluster (CI has kind)."""
    assert "make lint" in steps
    assert {part.name for part in PARTS} - called == by_hand | {"lint"}


def test_the_wheel_is_tried_on_every_python_that_it_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    claimed = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    for job in ("wheel", "core"):
        assert JOBS[job]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in claimed]
    assert "continue-on-error" not in JOBS["wheel"]


@pytest.mark.parametrize(
    ("job", "chosen", "programs"),
    [
        ("operator", "operator lab packaging", ("prometheus", "promtool")),
        ("cluster", "packaging integration e2e", ("prometheus", "promtool", "kubeconform")),
    ],
)
def test_a_job_has_the_programs_of_its_tests(job: str, chosen: str, programs: tuple[str, ...]) -> None:
    scripts = "\n".join(step.get("run", "") for step in JOBS[job]["steps"])
    for name in programs:
        assert f'-o "$RUNNER_TEMP/bin/{name}" "$package' in scripts
    assert scripts.index('bin" >> "$GITHUB_PATH"') < scripts.index(f'make test PART="{chosen}"')
