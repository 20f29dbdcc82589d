"""Runs a suite of a few lines under the settings of all tests, from a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]


def output_of(text: str, folder: Path, environment: Mapping[str, str] | None = None, *options: str) -> str:
    """Return what pytest prints of the suite."""
    suite = folder / "test_suite.py"
    suite.write_text(text)
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "support.settings"]
    return subprocess.run(
        [*command, "-c", str(TESTS.parent / "pyproject.toml"), *options, str(suite)],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=240,
    ).stdout  # fmt: skip
