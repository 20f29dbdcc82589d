"""All metrics that the operator exports: its own, and those of its jobs by ``JobGauges``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from heterotrain_operator.engine.job_gauges import JobGauges
from heterotrain_operator.engine.queue import Priority
from heterotrain_operator.prom.errors import PromBadAnswer, PromUnavailable

# Series exist from the start, so that the first increment is an increase for Prometheus.
RECONCILE_RESULTS = ("ok", "conflict", "throttled", "failed", "bug")
FAULT_PARTS = (
    *("what to do", "the number of workers", "shares", "a plan", "conditions about speed", "its events"),
    *("its status", "the allocation", "the layouts of members"),
)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_MINUTES = (*_SECONDS, 30, 60, 120, 300, 600)
"""For waits among all jobs: with a thousand of them, minutes were measured."""


class OperatorMetrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

        ProcessCollector(registry=self.registry)  # memory and CPU time
        self.job_gauges = JobGauges()
        self.registry.register(self.job_gauges)
        self.leader = gauge("heterotrain_operator_leader", "1 while this replica leads.")
        self.jobs = gauge("heterotrain_operator_jobs", "Known jobs.")
        self.pods = gauge("heterotrain_operator_pods", "Known worker pods.")
        self.held_nodes = gauge(
            "heterotrain_operator_held_nodes",
            "Nodes that are not used for a while because they were lost again and again.",
        )
        self.workqueue_depth = gauge("heterotrain_operator_workqueue_depth", "Jobs waiting for a pass.")
        self.queue_seconds = histogram(
            "heterotrain_operator_queue_duration_seconds",
            "Seconds that a job waited for its pass, by priority: urgent (training waits, or a node is about to "
            "end), changed, or routine.",
            "priority",
            buckets=_MINUTES,
        )
        self.reconciles = counter(
            "heterotrain_operator_reconcile", "Passes over jobs (reconciles), by result.", "result"
        )
        self.internal_errors = counter(
            "heterotrain_operator_internal_errors",
            "Unexpected errors in the operator, by the part that failed. Each is a bug.",
            "part",
        )
        self.reconcile_seconds = histogram(
            "heterotrain_operator_reconcile_duration_seconds", "Seconds of one pass over a job."
        )
        self.loop_delay_seconds = histogram(
            "heterotrain_operator_event_loop_delay_seconds",
            "Seconds by which the event loop, which serves all jobs, runs what is due late.",
        )
        self.decision_seconds = histogram(
            "heterotrain_operator_decision_duration_seconds", "Seconds of the decision within a pass."
        )
        self.allocations = counter(
            "heterotrain_operator_allocations", "Allocations of nodes to competing jobs, by result.", "result"
        )
        self.allocation_seconds = histogram(
            "heterotrain_operator_allocation_duration_seconds", "Seconds of one allocation for all jobs."
        )
        self.limited_jobs = gauge(
            "heterotrain_operator_limited_jobs",
            "Jobs with limited workers: other jobs compete for their nodes, or fewer workers are cheaper.",
        )
        self.moved_workers = counter(
            "heterotrain_operator_moved_workers",
            "Workers that the allocation gave to or took from competing jobs, with the reason of the new grant.",
            "change",
            "reason",
        )
        self.plans = counter("heterotrain_operator_plans_written", "Written plans.")
        self.plan_delivery_seconds = histogram(
            "heterotrain_operator_plan_delivery_duration_seconds",
            "Seconds from a plan's decision until the pods that deliver it were patched.",
        )
        self.pods_created = counter("heterotrain_operator_pods_created", "Created worker pods.")
        self.failures = counter(
            "heterotrain_operator_worker_failures",
            "Failures of workers by their own fault; those within 30 s count once.",
        )
        self.disruptions = counter("heterotrain_operator_worker_disruptions", "Disrupted workers.")
        self.telemetry_reads = counter(
            "heterotrain_operator_telemetry_reads", "Reads of telemetry from Prometheus, by result.", "result"
        )
        for priority in Priority:
            self.queue_seconds.labels(priority=priority)
        for result in RECONCILE_RESULTS:
            self.reconciles.labels(result=result)
        for part in FAULT_PARTS:
            self.internal_errors.labels(part=part)
        for result in ("ok", "bug"):
            self.allocations.labels(result=result)
        for result in ("ok", PromUnavailable.reason, PromBadAnswer.reason):
            self.telemetry_reads.labels(result=result)
        self.listed_age = gauge("heterotrain_operator_list_age_seconds", "Seconds since the last full list.")
        self.clock_skew = gauge(
            "heterotrain_operator_clock_skew_seconds",
            "Seconds by which the operator's clock is ahead of the API server's, whose time it uses.",
        )

    def note_queued(self, priority: Priority, seconds: float) -> None:
        """Note for how many seconds a job with this priority waited for its pass."""
        self.queue_seconds.labels(priority=priority).observe(seconds)
