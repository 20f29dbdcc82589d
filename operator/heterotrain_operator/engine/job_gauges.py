"""Gauges of each job: its workers, and its plan's predictions next to measured values.

A job's series disappear when it stops training (those of its workers: when it wants no more workers) or is deleted;
``heterotrain_operator_failed`` exists for failed jobs only. Unknown values are not exported. The labels are
``job_name`` and ``job_namespace``, because Prometheus uses ``job`` and ``namespace`` for the scrape target, which is
the operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from heterotrain_operator.api.conditions import ConditionType, find_condition
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.views import JobKey

_SPAN = re.compile(r"([0-9]{1,4})-([0-9]{1,4})")
LABELS = ("job_uid", "job_namespace", "job_name")


_Value = Callable[[HeteroTrainJobStatus, HeteroTrainJobSpec], float | None]


class _Gauge(NamedTuple):
    name: str
    help: str
    value: _Value


_TRAINING = (
    _Gauge(
        "predicted_step_seconds",
        "Predicted mean seconds of a step, by the plan in force.",
        lambda status, _: status.prediction.predicted_step_seconds if status.prediction else None,
    ),
    _Gauge(
        "measured_step_seconds",
        "Measured mean seconds of a step since the plan in force took effect.",
        lambda status, _: status.prediction.measured_step_seconds if status.prediction else None,
    ),
    _Gauge(
        "efficiency_ratio",
        "Throughput divided by the sum of the workers' solo rates.",
        lambda status, _: status.efficiency,
    ),
    _Gauge(
        "efficiency_ceiling_ratio",
        "Highest efficiency that the measured variances allow.",
        lambda status, _: status.plan.efficiency_ceiling,
    ),
)
"""Of jobs that train."""


def _condition(kind: ConditionType) -> _Value:
    def value(status: HeteroTrainJobStatus, _: HeteroTrainJobSpec) -> float | None:
        found = find_condition(status.conditions, kind)
        unknown = found is None or found.status == "Unknown" or found.reason == "NotConfigured"
        return None if found is None or unknown else float(found.status == "True")

    return value


def _granted(status: HeteroTrainJobStatus, _: HeteroTrainJobSpec) -> int | None:
    granted = [pool.granted for pool in status.pools if pool.granted is not None]
    return sum(granted) if granted else None


def _per_price(status: HeteroTrainJobStatus, _: HeteroTrainJobSpec) -> float | None:
    price = float(status.price_per_hour or 0)
    return status.samples_per_second * 3600.0 / price if status.samples_per_second and price else None


_WANTING = (
    _Gauge(
        "max_workers",
        "Workers that the job would use without competing jobs: its maximum.",
        lambda _, spec: most_workers(spec),
    ),
    _Gauge(
        "min_workers",
        "Least number of workers with which the job trains.",
        lambda _, spec: spec.elastic_policy.min_replicas,
    ),
    _Gauge(
        "granted_workers",
        "Workers that the allocation grants the job; absent without competing jobs.",
        _granted,
    ),
    _Gauge(
        "placed_workers",
        "Workers of the job on a node.",
        lambda status, _: sum(pool.placed for pool in status.pools),
    ),
    _Gauge(
        "samples_per_price",
        "Samples for one unit of price, by measured throughput and the price of the workers on nodes.",
        _per_price,
    ),
    _Gauge(
        "deadline_at_risk",
        "With objective: Deadline, 1 while the job is expected to end too late, else 0.",
        _condition(ConditionType.DEADLINE_AT_RISK),
    ),
    _Gauge(
        "diverging",
        "1 while the training loss climbs beyond its noise, else 0; absent while not known.",
        _condition(ConditionType.DIVERGING),
    ),
    _Gauge(
        "disruptions_in_a_row",
        "Disruptions without a committed step in between.",
        lambda status, _: status.internal.disruptions.incidents if status.internal.disruptions is not None else 0,
    ),
    _Gauge("running", "1 while the job trains, else 0.", _condition(ConditionType.RUNNING)),
    _Gauge(
        "telemetry_available",
        "1 while the job's telemetry is fresh, else 0; absent while not known, or without a Prometheus.",
        _condition(ConditionType.TELEMETRY_AVAILABLE),
    ),
    _Gauge(
        "progressing",
        "1 while the job commits steps at its own pace, 0 after ten mean steps without one; absent while not known.",
        _condition(ConditionType.PROGRESSING),
    ),
)
"""Of jobs that want workers."""


class _Units(NamedTuple):
    worker: str
    pool: str
    units: str


class _Job(NamedTuple):
    """The values of one job's series, instead of its status, which would be in memory a second time."""

    key: JobKey
    training: tuple[float | None, ...]
    """Of ``_TRAINING``; empty while it does not train."""
    wanting: tuple[float | None, ...]
    """Of ``_WANTING``."""
    units: tuple[_Units, ...]


def _values(key: JobKey, status: HeteroTrainJobStatus, spec: HeteroTrainJobSpec, *, trains: bool) -> _Job:
    return _Job(
        key,
        tuple(gauge.value(status, spec) for gauge in _TRAINING) if trains else (),
        tuple(gauge.value(status, spec) for gauge in _WANTING),
        tuple(_Units(w.name, w.pool, w.units) for w in status.workers if w.units) if trains else (),
    )


class JobGauges(Collector):
    """Gauges of all jobs that want workers, from their newest status."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._failed: dict[str, JobKey] = {}

    def show(
        self, key: JobKey, uid: str, status: HeteroTrainJobStatus | None, spec: HeteroTrainJobSpec | None = None
    ) -> None:
        """Show a job's newest status; ``None``, or a job that wants no workers, removes its series."""
        conditions = {c.type: c.status for c in status.conditions} if status is not None else {}
        at_rest = {ConditionType.SUSPENDED, ConditionType.SUCCEEDED, ConditionType.FAILED}
        rests = (
            any(conditions.get(kind.value) == "True" for kind in at_rest)
            or conditions.get(ConditionType.ACCEPTED.value) == "False"
        )
        if conditions.get(ConditionType.FAILED.value) == "True":
            self._failed[uid] = key
        else:
            self._failed.pop(uid, None)
        if status is None or spec is None or rests:
            self._jobs.pop(uid, None)
        else:
            self._jobs[uid] = _values(key, status, spec, trains=conditions.get(ConditionType.RUNNING.value) == "True")

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each gauge; jobs may come and go meanwhile, because this runs in a thread."""
        jobs = list(self._jobs.items())
        for number, gauge in enumerate(_TRAINING):
            trains = [(uid, job.key, job.training[number]) for uid, job in jobs if job.training]
            yield _family(gauge.name, gauge.help, trains)
        yield _units(jobs)
        for number, gauge in enumerate(_WANTING):
            yield _family(gauge.name, gauge.help, [(uid, job.key, job.wanting[number]) for uid, job in jobs])
        failed = [(uid, key, 1.0) for uid, key in list(self._failed.items())]
        yield _family("failed", "1 for a job that has failed, until it is deleted.", failed)


def _family(name: str, text: str, values: Iterable[tuple[str, JobKey, float | None]]) -> Metric:
    """Return a gauge of all jobs; values of ``None`` are left out."""
    family = GaugeMetricFamily(f"heterotrain_operator_{name}", text, labels=LABELS)
    for uid, key, value in values:
        if value is not None:
            family.add_metric((uid, key.namespace, key.name), value)
    return family


def _units(jobs: Iterable[tuple[str, _Job]]) -> Metric:
    """Return the number of units of the model that each worker's stage holds."""
    family = GaugeMetricFamily(
        "heterotrain_operator_worker_units",
        "Units of the model that a worker holds as a stage of a pipeline; the label names the first and the last.",
        labels=(*LABELS, "worker", "pool", "units"),
    )
    for uid, job in jobs:
        for worker in job.units:
            number = sum(int(last) - int(first) + 1 for first, last in _SPAN.findall(worker.units))
            family.add_metric((uid, job.key.namespace, job.key.name, *worker), number)
    return family
