"""What a dashboard for Grafana consists of, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
SIZES: Final = {"timeseries": (12, 8), "stat": (4, 4), "table": (24, 8)}
"""Width and height of panels, in cells of Grafana's grid; a row is one cell high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel.

    Attributes:
        title: with the unit where it is not a standard one.
        about: a sentence for its help.
        queries: (PromQL, legend), the first one with letter A. In a table, each is a column, and all give ``worker``.
        unit: as Grafana names it.
        kind: curves, a number each, or a table with a row for each worker.
    """

    title: str
    about: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "table"] = "timeseries"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that people fold: its title, and its panels from left to right and top to bottom."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A dashboard: variables, annotations and rows of panels."""

    uid: str
    title: str
    rows: Sequence[Row]
    variables: Sequence[dict[str, Any]] = ()
    annotations: Sequence[tuple[str, str, str]] = field(default=())
    """Name, PromQL and colour of each."""


_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"},
    "table": {"showHeader": True, "footer": {"show": False}},
}


def text(dashboard: Dashboard) -> str:
    """Return a dashboard as Grafana imports it."""
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    variables += [
        {"type": "query", "datasource": _DATASOURCE, "refresh": 2, "sort": 1, **each} for each in dashboard.variables
    ]
    return json.dumps(
        {
            "title": dashboard.title, "uid": dashboard.uid, "schemaVersion": 39, "version": 1, "editable": True,
            "tags": ["heterotrain"], "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
            "links": [{"type": "dashboards", "tags": ["heterotrain"], "title": "heterotrain", "keepTime": True}],
            "annotations": {"list": [
                {"name": name, "datasource": _DATASOURCE, "enable": True, "iconColor": colour, "expr": expr,
                 "titleFormat": name, "textFormat": "{{cause}}", "step": "15s"}
                for name, expr, colour in dashboard.annotations
            ]},
            "templating": {"list": variables},
            "panels": list(_panels(dashboard.rows)),
        },
        indent=1,
    ) + "\n"  # fmt: skip


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield each row and its panels, side by side until a line is full."""
    number = y = 0
    for row in rows:
        number += 1
        grid = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": grid, "panels": []}
        x, y, high = 0, y + 1, 0
        for panel in row.panels:
            width, height = SIZES[panel.kind]
            if x + width > WIDTH:
                x, y, high = 0, y + high, 0
            number += 1
            yield {"id": number, "gridPos": {"h": height, "w": width, "x": x, "y": y}, **_content(panel)}
            x, high = x + width, max(high, height)
        y += high


def _content(panel: Panel) -> dict[str, Any]:
    is_table = panel.kind == "table"
    letters = [chr(ord("A") + at) for at in range(len(panel.queries))]
    found: dict[str, Any] = {
        "type": panel.kind, "title": panel.title, "description": panel.about, "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {"refId": letter, "expr": expr, "legendFormat": legend}
            | ({"format": "table", "instant": True} if is_table else {"instant": True} if panel.kind == "stat" else {})
            for letter, (expr, legend) in zip(letters, panel.queries, strict=True)
        ],
    }  # fmt: skip
    if is_table:
        names = {f"Value #{letter}": legend for letter, (_, legend) in zip(letters, panel.queries, strict=True)}
        hidden = {f"Time{number}": True for number in ("", *(f" {n + 1}" for n in range(len(letters))))}
        found["transformations"] = [
            {"id": "joinByField", "options": {"byField": "worker", "mode": "outer"}},
            {"id": "organize", "options": {"excludeByName": hidden, "renameByName": names}},
        ]
    return found
