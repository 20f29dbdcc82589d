"""What the operator exports about each job that trains: what its plan predicts, and what came of it.

A job's series go when it stops training or is deleted, and a value that is not known is not exported. Job and namespace
have labels of their own, because Prometheus gives ``job`` and ``namespace`` to whom it scrapes: the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from heterotrain_operator.api.conditions import ConditionType
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.world.views import JobKey

LABELS = ("job_uid", "job_namespace", "job_name")


class _Series(NamedTuple):
    name: str
    help: str
    value: Callable[[HeteroTrainJobStatus], float | None]


_SERIES = (
    _Series(
        "heterotrain_operator_predicted_step_seconds",
        "Mean seconds of a step that the plan in force predicts.",
        lambda status: status.prediction.predicted_step_seconds if status.prediction else None,
    ),
    _Series(
        "heterotrain_operator_measured_step_seconds",
        "Mean seconds of a step at the shares of the plan in force, since it took effect.",
        lambda status: status.prediction.measured_step_seconds if status.prediction else None,
    ),
    _Series(
        "heterotrain_operator_measured_over_predicted_ratio",
        "Measured over predicted step time of the plan in force.",
        lambda status: status.prediction.measured_over_predicted if status.prediction else None,
    ),
    _Series(
        "heterotrain_operator_efficiency_ratio",
        "Throughput over the sum of what each worker reaches alone.",
        lambda status: status.efficiency,
    ),
    _Series(
        "heterotrain_operator_predicted_efficiency_ratio",
        "Efficiency that the newest plan predicts.",
        lambda status: status.plan.predicted_efficiency,
    ),
    _Series(
        "heterotrain_operator_efficiency_ceiling_ratio",
        "Best efficiency that the measured variances allow.",
        lambda status: status.plan.efficiency_ceiling,
    ),
)


class JobGauges(Collector):
    """Gauges of every job that trains, from its newest status."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[JobKey, HeteroTrainJobStatus]] = {}

    def show(self, key: JobKey, uid: str, status: HeteroTrainJobStatus | None) -> None:
        """Take a job's newest status; what does not train has no series."""
        running = (
            any(c.type == ConditionType.RUNNING.value and c.status == "True" for c in status.conditions)
            if status
            else False
        )
        if status is not None and running:
            self._jobs[uid] = (key, status)
        else:
            self._jobs.pop(uid, None)

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each quantity."""
        for series in _SERIES:
            family = GaugeMetricFamily(series.name, series.help, labels=LABELS)
            for uid, (key, status) in self._jobs.items():
                if (value := series.value(status)) is not None:
                    family.add_metric((uid, key.namespace, key.name), value)
            yield family
