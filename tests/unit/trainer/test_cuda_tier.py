"""The tests that need a GPU are at least collected where there is none: they import, and their names are right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_tests_for_a_gpu_can_be_collected() -> None:
    """In an interpreter of its own, as whoever has a GPU will run them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::test_" in line]
    assert {line.partition("::")[0] for line in collected} == {
        f"tests/cuda/{path.name}" for path in (ROOT / "tests" / "cuda").glob("test_*.py")
    }
