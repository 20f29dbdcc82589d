"""A job's metrics over time, as arrays: from the readings of its status, or from Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from heterotrain_core.contract import metrics as names
from numpy.typing import NDArray

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.prometheus import Span, series_of
from heterotrain_cli.cluster.view import JobSummary

Arrays = dict[str, NDArray[np.float64]]
MOST_READINGS: Final = 100_000
MOST_POINTS: Final = 10_000
"""Prometheus refuses ranges with more than 11,000 points."""

_SERIES: Final = {
    "epoch": names.EPOCH,
    "step": names.STEP,
    "loss": names.LOSS,
    "samples": names.SAMPLES_COMMITTED,
    "global_batch_size": names.GLOBAL_BATCH,
    "noise_scale_samples": names.NOISE_SCALE,
}


@dataclass(slots=True)
class History:
    """Readings of a job's status, one for each step that differs from the one before."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def add(self, view: JobSummary) -> None:
        """Keep a reading if the job has progressed since the last one."""
        status = view.status
        values = {
            "epoch": status.epoch, "step": status.step, "loss": status.loss, "samples": status.samples,
            "samples_per_second": status.samples_per_second, "efficiency": status.efficiency,
            "global_batch_size": status.global_batch_size, "noise_scale_samples": status.noise_scale_samples,
            **status.metrics,
        }  # fmt: skip
        row = {name: float(value) for name, value in values.items() if value is not None}
        before = {name: value for name, value in self.rows[-1].items() if name != "time_s"} if self.rows else {}
        if row and row != before and len(self.rows) < MOST_READINGS:
            self.rows.append({"time_s": view.now.timestamp(), **row})

    def arrays(self) -> Arrays:
        """Return an array for each name, all of the same length; NaN where a reading has no value."""
        return as_arrays(self.rows)


def as_arrays(rows: Iterable[Mapping[str, float]]) -> Arrays:
    """Return an array for each name that a row has, all of the same length."""
    every = list(rows)
    found = dict.fromkeys(name for row in every for name in row)
    return {name: np.array([row.get(name, math.nan) for row in every]) for name in found}


def shares_of(cluster: Cluster, where: str, view: JobSummary, *, every_s: float) -> dict[str, Arrays]:
    """Return times and mean shares of each worker, in samples of a step, over all its ranks.

    Args and errors are those of ``from_prometheus``.
    """
    span = _span(view, every_s)
    own = f'{{{names.LABEL_JOB_UID}="{view.body["metadata"]["uid"]}"}}[{max(60.0, 2 * span.step_s):.0f}s]'
    by = f"{names.LABEL_WORKER}, {names.LABEL_LOCAL_RANK}"
    samples, steps = (f"sum by ({by}) (increase({series}{own}))" for series in (names.SAMPLES, names.STEPS))
    query = f"sum by ({names.LABEL_WORKER}) ({samples} / ({steps} > 0))"
    return {
        each.labels[names.LABEL_WORKER]: as_arrays({"time_s": at_s, "share": value} for at_s, value in each.points)
        for each in series_of(cluster, where, query, [names.LABEL_WORKER], span)
    }


def _span(view: JobSummary, every_s: float) -> Span:
    """Return the points of a job's history."""
    end_s = view.now.timestamp()
    begin_s = end_s - (view.age_s or 0.0)
    return Span(begin_s=begin_s, end_s=end_s, step_s=max(every_s, (end_s - begin_s) / MOST_POINTS))


def from_prometheus(cluster: Cluster, where: str, view: JobSummary, *, every_s: float) -> Arrays:
    """Return the job's history as Prometheus has it.

    Args:
        cluster: through whose API server a service is reached.
        where: ``http://HOST:PORT``, or ``NAMESPACE/SERVICE:PORT`` of a service in the cluster.
        view: the job.
        every_s: seconds between two points; more where the job is so old that Prometheus would refuse.

    Raises:
        UnavailableError: there is no answer that can be read.
    """
    span = _span(view, every_s)
    rows: dict[float, dict[str, float]] = {}
    own = f'{{{names.LABEL_JOB_UID}="{view.body["metadata"]["uid"]}"}}'
    queries = {name: f"max({series}{own})" for name, series in _SERIES.items()}
    for name, query in [*queries.items(), ("", f"max by ({names.LABEL_NAME}) ({names.USER_METRIC}{own})")]:
        for labels, points in series_of(cluster, where, query, [] if name else [names.LABEL_NAME], span):
            for time_s, value in points:
                rows.setdefault(time_s, {"time_s": time_s})[name or labels[names.LABEL_NAME]] = value
    return as_arrays(rows[time_s] for time_s in sorted(rows))
