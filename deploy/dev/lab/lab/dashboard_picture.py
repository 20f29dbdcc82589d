"""A dashboard of the chart, drawn from a cluster's Prometheus: the same panels, queries and legends, without Grafana.

``python -m lab.dashboard_picture NAMESPACE JOB -o FILE.png`` shows whether queries, units and legends make sense on the
data of a real job. It says nothing about Grafana's own rendering.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

from heterotrain_core.contract import metrics
from matplotlib import pyplot as plt

from lab import dashboard_form, dashboards
from lab.install import this_cluster
from lab.telemetry import Prometheus

RATE_INTERVAL: Final = "10s"
"""For a scrape each second, as on the emulated cluster."""
UNITS: Final = {
    "s": "seconds",
    "percentunit": "fraction",
    "percent": "%",
    "Bps": "bytes/s",
    "watt": "W",
    "celsius": "°C",
    "short": "",
}
_ABOVE: Final = 0.05
"""Part of a panel's height that stays free above its curves."""
COLUMNS: Final = 24
"""Width of a dashboard in Grafana's grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a panel: its legend, and values by Unix time in seconds."""

    legend: str
    points: Sequence[tuple[float, float]]


def document(name: str) -> dict[str, Any]:
    """Return a dashboard as the chart installs it."""
    found: dict[str, Any] = json.loads(dashboard_form.text(dashboards.ALL[name]))
    return found


def expression(text: str, *, namespace: str, job: str, uid: str) -> str:
    """Return a query with the dashboard's variables filled in."""
    for variable, value in (
        ("$__rate_interval", RATE_INTERVAL),
        ("$job", uid),
        ("$namespace", namespace),
        ("$name", job),
    ):
        text = text.replace(variable, value)
    return text


def legend(pattern: str, labels: Mapping[str, str]) -> str:
    """Return the legend of a series, as Grafana makes it: ``{{worker}} sends``."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), pattern)


def lines(
    prometheus: Prometheus, panel: Mapping[str, Any], *, namespace: str, job: str, uid: str, start_s: float
) -> list[Line]:
    """Return what a panel shows from ``start_s`` until now."""
    found = []
    for target in panel["targets"]:
        query = expression(target["expr"], namespace=namespace, job=job, uid=uid)
        for row in prometheus.series(query, start_s=start_s, end_s=time.time()):
            points = [(float(at_s), float(value)) for at_s, value in row["values"]]
            found.append(Line(legend=legend(target.get("legendFormat", ""), row["metric"]), points=points))
    return found


def draw(panels: Sequence[Mapping[str, Any]], contents: Sequence[Sequence[Line]], title: str, path: Path) -> None:
    """Draw the panels in the dashboard's grid, from the first point of all; one without data says so."""
    times_s = [at_s for shown in contents for line in shown for at_s, _ in line.points]
    start_s, end_s = min(times_s, default=0.0), max(times_s, default=1.0)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(COLUMNS / 2, height / 3.2), dpi=100, layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(height, COLUMNS)
    for panel, shown in zip(panels, contents, strict=True):
        at = panel["gridPos"]
        axes = figure.add_subplot(grid[at["y"] : at["y"] + at["h"], at["x"] : at["x"] + at["w"]])
        axes.set_title(panel["title"], fontsize=10, loc="left", pad=16)  # above the legend
        axes.set_ylabel(UNITS.get(panel["fieldConfig"]["defaults"].get("unit", "short"), ""), fontsize=8)
        for line in shown:
            times_s = [at_s - start_s for at_s, _ in line.points]
            axes.plot(times_s, [value for _, value in line.points], linewidth=1.2, label=line.legend)
        if shown:
            # Between title and curves.
            axes.legend(
                fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=6, frameon=False, borderaxespad=0.0
            )
            axes.set_xlabel("seconds", fontsize=8)
            axes.set_xlim(0.0, max(1.0, end_s - start_s))  # the same in all panels
        else:
            axes.text(0.5, 0.5, "No data", ha="center", va="center", transform=axes.transAxes)
            axes.set_xticks([])
        axes.tick_params(labelsize=7)
        axes.grid(visible=True, alpha=0.3)
        bottom, top = min(0.0, axes.get_ylim()[0]), axes.get_ylim()[1]
        axes.set_ylim(bottom, top + _ABOVE * (top - bottom))
    figure.savefig(path)
    plt.close(figure)


def main() -> int:
    """Draw the first rows of the dashboard of a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("namespace")
    parser.add_argument("job")
    parser.add_argument("-o", "--out", type=Path, default=Path("dashboard.png"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--uid", help="the job's uid, if the job is gone")
    arguments = parser.parse_args()
    cluster = this_cluster(arguments.namespace)
    prometheus = Prometheus(cluster)
    where = f'{{{metrics.LABEL_WORKER}=~"{arguments.job}-w[0-9]+"}}'
    uids = [arguments.uid] if arguments.uid else [
        row["metric"][metrics.LABEL_JOB_UID] for row in prometheus.query(f"max by (job_uid) ({metrics.READY}{where})")
    ]  # fmt: skip
    if len(uids) != 1:
        print(f"{len(uids)} runs of {arguments.job} are there: give --uid, one of {uids}", file=sys.stderr)
        return 1
    dashboard = document("job")
    every = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
    rows = sorted({panel["gridPos"]["y"] for panel in every})[: arguments.rows]
    panels = [panel for panel in every if panel["gridPos"]["y"] in rows]
    start_s = time.time() - 60 * arguments.minutes
    contents = [
        lines(prometheus, each, namespace=arguments.namespace, job=arguments.job, uid=uids[0], start_s=start_s)
        for each in panels
    ]
    draw(panels, contents, f"{dashboard['title']}: {arguments.job}", arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
