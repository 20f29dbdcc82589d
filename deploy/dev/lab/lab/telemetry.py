"""A job's telemetry, read from Prometheus: the counters of each (member, share), and series over time for pictures."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heterotrain_core.contract import metrics

from lab.cluster import Cluster

_PROXY = "/api/v1/namespaces/monitoring/services/prometheus:http/proxy/api/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A rank, and the shape of its steps."""

    worker: str
    local_rank: str
    share_samples: int
    micro_batch_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTotals:
    """Sums over ``steps`` steps of one phase: seconds and squared seconds."""

    steps: float
    seconds: float
    squared_seconds: float

    @property
    def mean_s(self) -> float:
        """Mean seconds per step."""
        return self.seconds / self.steps

    @property
    def deviation_s(self) -> float:
        """Standard deviation of one step's seconds."""
        return math.sqrt(max(0.0, self.squared_seconds / self.steps - self.mean_s**2))


@dataclass(frozen=True, slots=True)
class Prometheus:
    """The cluster's Prometheus, reached through the API server so that it works from outside the cluster."""

    cluster: Cluster

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current instant vector of a PromQL expression."""
        path = f"{_PROXY}/query?{urllib.parse.urlencode({'query': expression})}"
        result: list[dict[str, Any]] = self.cluster.raw(path)["data"]["result"]
        return result

    def series(self, expression: str, *, start_s: float, end_s: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        """Return the range vector of an expression between two Unix times."""
        arguments = {"query": expression, "start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:g}"}
        result: list[dict[str, Any]] = self.cluster.raw(f"{_PROXY}/query_range?{urllib.parse.urlencode(arguments)}")[
            "data"
        ]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Return the single value of an expression, or ``None`` if the result is empty."""
        result = self.query(expression)
        return float(result[0]["value"][1]) if result else None

    def totals(self, job_uid: str, phase: str, *, window_s: float = 7200) -> Mapping[Shape, PhaseTotals]:
        """Return a job's whole-run totals of one phase for each shape.

        ``max_over_time`` also finds the counters of deleted pods: a counter of one process only grows.
        """

        def by_shape(metric: str, extra: str = "") -> dict[Shape, float]:
            rows = self.query(f'max_over_time({metric}{{{metrics.LABEL_JOB_UID}="{job_uid}"{extra}}}[{window_s:.0f}s])')
            sums: dict[Shape, float] = {}
            for row in rows:
                labels = row["metric"]
                shape = Shape(
                    worker=labels[metrics.LABEL_WORKER],
                    local_rank=labels[metrics.LABEL_LOCAL_RANK],
                    share_samples=int(labels[metrics.LABEL_SHARE]),
                    micro_batch_samples=int(labels[metrics.LABEL_MICRO_BATCH]),
                )
                # A restarted worker of the same name is another series of the same shape: they add up.
                sums[shape] = sums.get(shape, 0.0) + float(row["value"][1])
            return sums

        of_phase = f',{metrics.LABEL_PHASE}="{phase}"'
        steps = by_shape(metrics.STEPS)
        seconds = by_shape(metrics.PHASE_SECONDS, of_phase)
        squares = by_shape(metrics.PHASE_SECONDS_SQUARED, of_phase)
        return {
            shape: PhaseTotals(steps=count, seconds=seconds[shape], squared_seconds=squares.get(shape, 0.0))
            for shape, count in steps.items()
            if count > 0 and shape in seconds
        }
