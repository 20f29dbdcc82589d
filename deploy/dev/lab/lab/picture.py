"""The picture of a run: shares and step time over time, with marked events."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from heterotrain_core.contract import metrics
from matplotlib import pyplot as plt

from lab.telemetry import Prometheus

_WINDOW = "6s"
_GAP_S = 3.0
_UNUSUAL = 4.0
"""The picture's upper limit, relative to the median step time; the first step of a cold start exceeds it."""

_NEAR = 0.015
"""Of the picture's width: numbers of events that are nearer to each other would overlap."""
_ROW = 0.05
"""Height of a row of numbers, of the upper curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event at a Unix time."""

    at_s: float
    text: str


def draw(
    prometheus: Prometheus,
    *,
    job_uid: str,
    pools: Mapping[str, str],
    start_s: float,
    end_s: float,
    events: Sequence[Event],
    path: Path,
) -> None:
    """Write a PNG of a job's shares (samples) and step time (seconds) between two Unix times.

    Args:
        prometheus: the Prometheus that scraped the job.
        job_uid: the job.
        pools: pool by worker, for the legend.
        start_s: left end of the picture.
        end_s: right end.
        events: marked by number, with their texts below.
        path: the file to write.
    """
    end_s = min(end_s, last_step_s(prometheus, job_uid, start_s=start_s, end_s=end_s))
    selector = f'{{{metrics.LABEL_JOB_UID}="{job_uid}"}}'
    by = f"sum by ({metrics.LABEL_WORKER})"
    samples = f"{by} (rate({metrics.SAMPLES}{selector}[{_WINDOW}]))"
    steps = f"{by} (rate({metrics.STEPS}{selector}[{_WINDOW}]))"
    shares = prometheus.series(f"({samples}) / ({steps} > 0)", start_s=start_s, end_s=end_s)
    step_s = prometheus.series(f"1 / (max({steps}) > 0)", start_s=start_s, end_s=end_s)

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(11, 6.5), height_ratios=[3, 2])
    for row in sorted(shares, key=lambda row: str(row["metric"].get(metrics.LABEL_WORKER))):
        worker = row["metric"][metrics.LABEL_WORKER]
        label = f"{worker} ({pools[worker]})" if worker in pools else worker
        for number, (times, values) in enumerate(_pieces(row["values"], start_s)):
            above.step(times, values, where="post", color=_color(worker), label=label if number == 0 else None)
    above.set_ylabel("share (samples of each step)")
    above.set_ylim(bottom=0)
    above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for row in step_s:
        for times, values in _pieces(row["values"], start_s):
            below.plot(times, values, color="black")
    below.set_ylabel("step time (s)")
    below.set_ylim(0, _UNUSUAL * _median([value for row in step_s for _, value in row["values"]]))
    below.set_xlabel("seconds since kubectl apply")
    legend = []
    rows = rows_of([event.at_s for event in events], near_s=_NEAR * max(end_s - start_s, 1.0))
    for number, event in enumerate(events, start=1):
        at_s = event.at_s - start_s
        legend.append(f"{number}  {at_s:.0f} s: {event.text}")
        for axis in (above, below):
            axis.axvline(at_s, color="tab:red", linestyle=":", linewidth=1)
        above.annotate(
            str(number), (at_s, 1.01 + _ROW * rows[number - 1]), xycoords=("data", "axes fraction"), color="tab:red",
            ha="center",
        )  # fmt: skip
    figure.suptitle("Shares follow the machines; the global batch stays the same")
    figure.text(0.08, 0.0, "\n".join(legend), fontsize=8, color="tab:red", va="top")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def rows_of(times_s: Sequence[float], *, near_s: float) -> list[int]:
    """Return the row of each event's number, from 0, so that no two numbers of a row are nearer than ``near_s``."""
    rows: list[int] = []
    for index, at_s in enumerate(times_s):
        taken = {row for row, other_s in zip(rows, times_s[:index], strict=True) if abs(at_s - other_s) < near_s}
        rows.append(next(row for row in range(index + 1) if row not in taken))
    return rows


def last_step_s(prometheus: Prometheus, job_uid: str, *, start_s: float, end_s: float) -> float:
    """Return the Unix time of the last scrape with a new step, or ``start_s`` if there is none.

    Afterwards workers write the last checkpoint and end one by one. A rate over a window in that time would show slow
    steps that never existed.
    """
    counted = f'sum by ({metrics.LABEL_WORKER}) ({metrics.STEPS}{{{metrics.LABEL_JOB_UID}="{job_uid}"}})'
    rows = prometheus.series(counted, start_s=start_s, end_s=end_s)
    return max(
        (
            float(at_s)
            for row in rows
            for (_, before), (at_s, after) in pairwise(row["values"])
            if float(after) > float(before)
        ),
        default=start_s,
    )


def _pieces(values: Sequence[tuple[float, str]], start_s: float) -> list[tuple[list[float], list[float]]]:
    """Split a series at long gaps: a line over a gap would show steps that never existed."""
    pieces: list[tuple[list[float], list[float]]] = []
    last_s = float("-inf")
    for at_s, value in values:
        if float(at_s) - last_s > _GAP_S:
            pieces.append(([], []))
        last_s = float(at_s)
        pieces[-1][0].append(last_s - start_s)
        pieces[-1][1].append(float(value))
    return pieces


def _color(worker: str) -> str:
    """Return the same colour for the same worker index in every picture."""
    index = worker.rpartition("-w")[2]
    return f"C{int(index) % 10}" if index.isdecimal() else "C0"


def _median(values: Sequence[str]) -> float:
    return statistics.median(map(float, values)) if values else 1.0
