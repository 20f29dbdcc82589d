"""Dashboard and alerts query only series that the operator or the workers export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.engine.metrics import OperatorMetrics

CHART = Path(__file__).parents[2] / "helm/heterotrain"

SUFFIXES = {"counter": "_total", "histogram": "_bucket"}


def exported() -> set[str]:
    """Return the names of all series: those of ranks by the contract, and the operator's own."""
    ranks = {value for value in vars(metrics).values() if isinstance(value, str) and value.startswith("heterotrain_")}
    families = {f"{family.name}{SUFFIXES.get(family.type, '')}" for family in OperatorMetrics().registry.collect()}
    return ranks | families


def queried() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((CHART / "files/dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    yield from re.findall(r"- alert: (\w+)\n\s+expr: (.*)", (CHART / "templates/monitoring.yaml").read_text())


@pytest.mark.parametrize(("where", "expr"), list(queried()))
def test_every_queried_series_is_exported(where: str, expr: str) -> None:
    names = set(re.findall(r"heterotrain_[a-z_]+", expr))
    assert names, where
    assert names - exported() == set(), where


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((CHART / "files/dashboard.json").read_text())["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
