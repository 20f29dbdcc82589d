"""Tests that need a GPU or a cluster can at least be collected without one: their imports and names are valid."""

from __future__ import annotations

from pathlib import Path

from support import repeat
from support.zygote import Zygote

ROOT = Path(__file__).parents[3]


FOLDERS = ("cuda", "e2e", "integration", "kueue", "coscheduling", "packaging")


def test_the_tests_that_need_more_than_this_machine_can_be_collected(zygote: Zygote, tmp_path: Path) -> None:
    """They are collected in a separate process, as on a machine that has what they need."""
    folders = [f"tests/{folder}" for folder in FOLDERS]
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *folders]
    done = zygote.run(tmp_path, *command, inside=ROOT, **{repeat.VARIABLE: repeat.ALL})
    assert done.code == 0, done.text
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::test_" in line}
    expected = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("test_*.py")}
    assert collected == expected
