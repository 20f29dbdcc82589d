"""Which tests run beside a cluster, and which run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lab.all_tests import ALONE, Tiers
from lab.cluster import REPOSITORY
from lab.lanes import Programs


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Return the command of each program of the lanes without a cluster."""
    found: dict[str, tuple[str, ...]] = {}

    def noted(_programs: Programs, name: str, *command: str, **_: Any) -> None:
        found[name] = command

    monkeypatch.setattr(Programs, "run", noted)
    tiers = Tiers(Programs(tmp_path), was_running=True)
    tiers.without_cluster()
    tiers.distributed()
    return found


@pytest.mark.parametrize("folder", ALONE)
def test_tests_of_connections_run_once_and_not_beside_a_cluster(
    folder: str, commands: dict[str, tuple[str, ...]]
) -> None:
    assert list((REPOSITORY / folder).rglob("test_*.py"))
    assert f"--ignore={folder}" in commands["unit tests"]
    assert folder in commands["distributed tests"]


def test_nothing_else_is_left_out(commands: dict[str, tuple[str, ...]]) -> None:
    assert sum("--ignore" in word or "--deselect" in word for word in commands["unit tests"]) == len(ALONE)
    assert {"tests/unit", "tests/shell"} <= {*commands["unit tests"]}
    assert "tests/distributed" in commands["distributed tests"]
