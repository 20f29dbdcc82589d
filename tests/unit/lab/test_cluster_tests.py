"""The cluster's own tests run after a change of the cluster, and not again before the next one."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import cluster_tests


def test_they_are_due_until_they_have_passed_with_the_present_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETEROTRAIN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "node.py").write_text("1")
    assert cluster_tests.are_due([folder]), "on a new machine"
    cluster_tests.passed([folder])
    assert not cluster_tests.are_due([folder])
    (folder / "node.py").write_text("2")
    assert cluster_tests.are_due([folder]), "after a change"
    cluster_tests.passed([folder])
    (folder / "more.py").write_text("")
    assert cluster_tests.are_due([folder]), "after a new file"


def test_the_cluster_s_files_are_launcher_configuration_and_tests() -> None:
    names = {"deploy/dev/cluster", "kind-config.yaml", "tests/integration/cluster"}
    assert {str(path.relative_to(cluster_tests.REPOSITORY)) for path in cluster_tests.PARTS} == names
    assert all(path.exists() for path in cluster_tests.PARTS)
