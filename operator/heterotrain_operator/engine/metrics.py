"""All metrics that the operator exports: its own, and those of its jobs by ``JobGauges``."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from heterotrain_operator.engine.job_gauges import JobGauges
from heterotrain_operator.engine.queue import Priority
from heterotrain_operator.prom.errors import PromBadAnswer, PromUnavailable

RECONCILE_RESULTS = ("ok", "conflict", "throttled", "failed", "bug")
FAULT_PARTS = (
    *("what to do", "the number of workers", "shares", "a plan", "conditions about speed", "its events"),
    *("its status", "the allocation", "the layouts of members"),
)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_MINUTES = (*_SECONDS, 30, 60, 120, 300, 600)
"""For waits among all jobs: with a thousand of them, minutes were measured."""


class _Maker:
    """Makes metrics in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"heterotrain_operator_{name}", text, registry=self._registry)

    def counter(self, name: str, text: str, **values: Sequence[str]) -> Counter:
        """Return a counter by labels; with values of its only label, their series exist from the start.

        So the first increment is an increase for Prometheus.
        """
        made = Counter(f"heterotrain_operator_{name}", text, tuple(values), registry=self._registry)
        if len(values) == 1:
            ((label, known),) = values.items()
            for value in known:
                made.labels(**{label: value})
        return made

    def seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"heterotrain_operator_{name}_seconds", text, registry=self._registry, buckets=_SECONDS)


class OperatorMetrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory and CPU time
        self.job_gauges = JobGauges()
        self.registry.register(self.job_gauges)
        make = _Maker(self.registry)
        self._of_replica(make)
        self._of_passes(make)
        self._of_allocation(make)
        self._of_workers(make)

    def _of_replica(self, make: _Maker) -> None:
        """Make the metrics of this process and of what it knows."""
        self.leader = make.gauge("leader", "1 while this replica leads.")
        self.jobs = make.gauge("jobs", "Known jobs.")
        self.pods = make.gauge("pods", "Known worker pods.")
        self.listed_age = make.gauge("list_age_seconds", "Seconds since the last full list.")
        self.clock_skew = make.gauge(
            "clock_skew_seconds",
            "Seconds by which the operator's clock is ahead of the API server's, whose time it uses.",
        )
        self.loop_delay_seconds = make.seconds(
            "event_loop_delay", "Seconds by which the event loop, which serves all jobs, runs what is due late."
        )
        self.internal_errors = make.counter(
            "internal_errors",
            "Unexpected errors in the operator, by the part that failed. Each is a bug.",
            part=FAULT_PARTS,
        )
        self.telemetry_reads = make.counter(
            "telemetry_reads",
            "Reads of telemetry from Prometheus, by result.",
            result=("ok", PromUnavailable.reason, PromBadAnswer.reason),
        )

    def _of_passes(self, make: _Maker) -> None:
        """Make the metrics of passes and of the queue before them."""
        self.workqueue_depth = make.gauge("workqueue_depth", "Jobs waiting for a pass.")
        self.queue_seconds = Histogram(
            "heterotrain_operator_queue_duration_seconds",
            "Seconds that a job waited for its pass, by priority: urgent (training waits, or a node is about to "
            "end), changed, or routine.",
            ("priority",),
            registry=self.registry,
            buckets=_MINUTES,
        )
        for priority in Priority:
            self.queue_seconds.labels(priority=priority)
        self.reconciles = make.counter(
            "reconcile", "Passes over jobs (reconciles), by result.", result=RECONCILE_RESULTS
        )
        self.reconcile_seconds = make.seconds("reconcile_duration", "Seconds of one pass over a job.")
        self.decision_seconds = make.seconds("decision_duration", "Seconds of the decision within a pass.")

    def _of_allocation(self, make: _Maker) -> None:
        """Make the metrics of sharing nodes between jobs."""
        self.allocations = make.counter(
            "allocations", "Allocations of nodes to competing jobs, by result.", result=("ok", "bug")
        )
        self.allocation_seconds = make.seconds("allocation_duration", "Seconds of one allocation for all jobs.")
        self.limited_jobs = make.gauge(
            "limited_jobs",
            "Jobs with limited workers: other jobs compete for their nodes, or fewer workers are cheaper.",
        )
        self.moved_workers = make.counter(
            "moved_workers",
            "Workers that the allocation gave to or took from competing jobs, with the reason of the new grant.",
            change=(),
            reason=(),
        )

    def _of_workers(self, make: _Maker) -> None:
        """Make the metrics of plans and worker pods."""
        self.plans = make.counter("plans_written", "Written plans.")
        self.plan_delivery_seconds = make.seconds(
            "plan_delivery_duration", "Seconds from a plan's decision until the pods that deliver it were patched."
        )
        self.pods_created = make.counter("pods_created", "Created worker pods.")
        self.failures = make.counter(
            "worker_failures", "Failures of workers by their own fault; those within 30 s count once."
        )
        self.disruptions = make.counter("worker_disruptions", "Disrupted workers.")

    def note_queued(self, priority: Priority, seconds: float) -> None:
        """Note for how many seconds a job with this priority waited for its pass."""
        self.queue_seconds.labels(priority=priority).observe(seconds)
