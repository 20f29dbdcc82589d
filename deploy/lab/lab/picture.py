"""The picture of a run: shares and step time over time, with what happened marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from heterotrain_core.contract import metrics
from matplotlib import pyplot as plt

from lab.telemetry import Prometheus

_WINDOW = "6s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a Unix time."""

    at_s: float
    text: str


def draw(
    prometheus: Prometheus, *, job_uid: str, start_s: float, end_s: float, events: Sequence[Event], path: Path
) -> None:
    """Write a PNG of a job's shares (stacked, samples) and step time (seconds) between two Unix times."""
    selector = f'{{{metrics.LABEL_JOB_UID}="{job_uid}"}}'
    by = f"sum by ({metrics.LABEL_WORKER})"
    samples = f"{by} (rate({metrics.SAMPLES}{selector}[{_WINDOW}]))"
    steps = f"{by} (rate({metrics.STEPS}{selector}[{_WINDOW}]))"
    shares = prometheus.series(f"({samples}) / ({steps} > 0)", start_s=start_s, end_s=end_s)
    step_s = prometheus.series(f"1 / (max({steps}) > 0)", start_s=start_s, end_s=end_s)

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(11, 6), height_ratios=[3, 2])
    for row in sorted(shares, key=lambda row: str(row["metric"].get(metrics.LABEL_WORKER))):
        times = [float(at) - start_s for at, _ in row["values"]]
        above.step(
            times, [float(value) for _, value in row["values"]], where="post", label=row["metric"][metrics.LABEL_WORKER]
        )
    above.set_ylabel("share (samples of each step)")
    above.set_ylim(bottom=0)
    above.legend(loc="upper right")
    for row in step_s:
        below.plot(
            [float(at) - start_s for at, _ in row["values"]],
            [float(value) for _, value in row["values"]],
            color="black",
        )
    below.set_ylabel("step time (s)")
    below.set_ylim(bottom=0)
    below.set_xlabel("seconds since kubectl apply")
    for number, event in enumerate(events):
        for axis in (above, below):
            axis.axvline(event.at_s - start_s, color="tab:red", linestyle=":", linewidth=1)
        above.annotate(
            event.text,
            (event.at_s - start_s, 0.02 + 0.07 * (number % 6)),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            color="tab:red",
        )
    figure.suptitle("Shares follow the machines; the global batch stays the same")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
