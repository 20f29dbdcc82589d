"""An operator that has noted losses of nodes is installed anew, without the notes; any other one stays installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab import install as installing
from lab.cluster import Cluster

PROGRAM = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
  *"get lease heterotrain-operator"*"heterotrain\\.dev/node-losses"*) printf '%s' "$LOSSES" ;;
  *"rollout status"*) echo "successfully rolled out" ;;
esac
"""


@pytest.mark.parametrize("losses", ["", '[["node-3",3,1764000000.0,0]]'])
def test_losses_that_tests_have_caused_are_forgotten(losses: str, tmp_path: Path) -> None:
    for name in ("kubectl", "helm"):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    path, calls = f"{tmp_path}:{os.environ['PATH']}", tmp_path / "calls"
    installing.install(Cluster(environment={"PATH": path, "CALLS": str(calls), "LOSSES": losses}))
    changes = [line for line in calls.read_text().splitlines() if line.startswith("helm") or "delete" in line]
    removed = [line.split()[:2] for line in changes if "uninstall" in line or "delete lease" in line]
    assert len(removed) == (2 if losses else 0)
    assert changes[-1].startswith("helm upgrade --install"), "the removal comes first"
    if losses:
        assert "uninstall" in changes[0], "an operator that runs would write its notes again"
