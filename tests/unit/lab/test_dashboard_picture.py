"""The picture of a dashboard: variables and legends as Grafana fills them in, and a panel without data says so."""

from __future__ import annotations

from pathlib import Path

from lab import dashboard_picture
from lab.dashboard_picture import Line


def test_every_variable_of_every_query_is_filled_in() -> None:
    for panel in dashboard_picture.document("job")["panels"]:
        for target in panel.get("targets", ()):
            query = dashboard_picture.expression(target["expr"], namespace="ml", job="digits", uid="u1")
            assert "$" not in query
            assert "u1" in query or "digits" in query


def test_a_legend_has_the_labels_of_its_series() -> None:
    labels = {"worker": "digits-w0", "units": "0-8"}
    assert dashboard_picture.legend("{{worker}}: {{units}}", labels) == "digits-w0: 0-8"
    assert dashboard_picture.legend("achieved", labels) == "achieved"


def test_every_panel_is_drawn(tmp_path: Path) -> None:
    every = dashboard_picture.document("job")["panels"]
    panels = [panel for panel in every if panel["type"] == "timeseries"][:4]
    some = [Line(legend="a", points=[(1.7e9, 1.0), (1.7e9 + 60, 2.0)])]
    dashboard_picture.draw(panels, [some, [], some, some], "heterotrain / job", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
