"""Tests that need a GPU can at least be collected without one: their imports and names are valid."""

from __future__ import annotations

from pathlib import Path

from support.zygote import Zygote

ROOT = Path(__file__).parents[3]


def test_the_tests_for_a_gpu_can_be_collected(zygote: Zygote, tmp_path: Path) -> None:
    """They are collected in a separate process, as on a machine with a GPU."""
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/cuda"]
    done = zygote.run(tmp_path, *command, inside=ROOT)
    assert done.code == 0, done.text
    collected = [line for line in done.stdout.splitlines() if "::test_" in line]
    assert {line.partition("::")[0] for line in collected} == {
        f"tests/cuda/{path.name}" for path in (ROOT / "tests" / "cuda").glob("test_*.py")
    }
