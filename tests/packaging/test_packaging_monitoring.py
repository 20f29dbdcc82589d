"""Dashboard and alerts query only series that the operator or the workers export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.engine.metrics import OperatorMetrics
from support.helm import of_kind, render

CHART = Path(__file__).parents[2] / "helm/heterotrain"

SUFFIXES = {"counter": "_total", "histogram": "_bucket"}


def exported() -> set[str]:
    """Return the names of all series: those of ranks by the contract, and the operator's own."""
    ranks = {value for value in vars(metrics).values() if isinstance(value, str) and value.startswith("heterotrain_")}
    families = {f"{family.name}{SUFFIXES.get(family.type, '')}" for family in OperatorMetrics().registry.collect()}
    return ranks | families


OF_OTHERS = ("DCGM_FI_DEV_GPU_UTIL", "container_network_transmit_bytes_total", "container_network_receive_bytes_total")
"""Series of NVIDIA's exporter and of the kubelets."""


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((CHART / "files/dashboards").glob("*.json"))]


def queried() -> Iterator[tuple[str, str]]:
    for dashboard in dashboards():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], target["expr"]
        for annotation in dashboard["annotations"]["list"]:
            yield annotation["name"], annotation["expr"]
    yield from re.findall(r"- alert: (\w+)\n\s+expr: (.*)", (CHART / "templates/monitoring.yaml").read_text())


@pytest.mark.parametrize(("where", "expr"), list(queried()))
def test_every_queried_series_is_exported(where: str, expr: str) -> None:
    names = set(re.findall(r"heterotrain_[a-z_]+", expr))
    assert names or any(other in expr for other in OF_OTHERS), where
    assert names - exported() == set(), where


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda each: each["uid"])
def test_panels_are_in_rows_and_explain_themselves(dashboard: dict[str, Any]) -> None:
    first, *panels = dashboard["panels"]
    assert first["type"] == "row"
    assert [panel["title"] for panel in panels if panel["type"] != "row" and len(panel["description"]) < 10] == []
    kinds = {panel["type"] for panel in dashboard["panels"]}
    assert kinds == ({"row", "stat", "table", "timeseries"} if "job" in dashboard["uid"] else {"row", "timeseries"})
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_a_table_of_workers_hides_times_and_names_its_columns() -> None:
    (table,) = [panel for each in dashboards() for panel in each["panels"] if panel["type"] == "table"]
    join, organize = table["transformations"]
    assert join["options"]["byField"] == "worker"
    assert all(target["format"] == "table" and target["instant"] for target in table["targets"])
    columns = {f"Value #{target['refId']}": target["legendFormat"] for target in table["targets"]}
    assert organize["options"]["renameByName"] == columns


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda each: each["uid"])
def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.needs_program("helm")
def test_the_chart_installs_every_dashboard_unchanged() -> None:
    (found,) = [
        each["data"]
        for each in of_kind(render("monitoring.dashboard.enabled=true"), "ConfigMap")
        if each["metadata"]["name"].endswith("-dashboards")
    ]
    assert {key: json.loads(value) for key, value in found.items()} == {
        f"heterotrain-{path.stem}.json": json.loads(path.read_text())
        for path in (CHART / "files/dashboards").glob("*.json")
    }
