"""Tests that need a GPU can at least be collected without one: their imports and names are valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_tests_for_a_gpu_can_be_collected() -> None:
    """They are collected in a separate interpreter, as on a machine with a GPU."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::test_" in line]
    assert {line.partition("::")[0] for line in collected} == {
        f"tests/cuda/{path.name}" for path in (ROOT / "tests" / "cuda").glob("test_*.py")
    }
