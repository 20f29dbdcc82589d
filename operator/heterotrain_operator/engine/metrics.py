"""All metrics that the operator exports: its own, and those of its jobs by ``JobGauges``."""

from __future__ import annotations

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
        ProcessCollector(registry=self.registry)  # memory and CPU time
        self.job_gauges = JobGauges()
        self.registry.register(self.job_gauges)
        self.leader = Gauge("heterotrain_operator_leader", "1 while this replica leads.", registry=self.registry)
        self.jobs = Gauge("heterotrain_operator_jobs", "Known jobs.", registry=self.registry)
        self.pods = Gauge("heterotrain_operator_pods", "Known worker pods.", registry=self.registry)
        self.held_nodes = Gauge(
            "heterotrain_operator_held_nodes",
            "Nodes that are not used for a while because they were lost again and again.",
            registry=self.registry,
        )
        self.workqueue_depth = Gauge(
            "heterotrain_operator_workqueue_depth", "Jobs waiting for a pass.", registry=self.registry
        )
        self.queue_seconds = Histogram(
            "heterotrain_operator_queue_duration_seconds",
            "Seconds that a job waited for its pass, by priority: urgent (training waits, or a node is about to end), "
            "changed, or routine.",
            ["priority"],
            buckets=_MINUTES,
            registry=self.registry,
        )
        self.reconciles = Counter(
            "heterotrain_operator_reconcile",
            "Passes over jobs (reconciles), by result.",
            ["result"],
            registry=self.registry,
        )
        self.internal_errors = Counter(
            "heterotrain_operator_internal_errors",
            "Unexpected errors in the operator, by the part that failed. Each is a bug.",
            ["part"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "heterotrain_operator_reconcile_duration_seconds",
            "Seconds of one pass over a job.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.loop_delay_seconds = Histogram(
            "heterotrain_operator_event_loop_delay_seconds",
            "Seconds by which the event loop, which serves all jobs, runs what is due late.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.decision_seconds = Histogram(
            "heterotrain_operator_decision_duration_seconds",
            "Seconds of the decision within a pass.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.allocations = Counter(
            "heterotrain_operator_allocations",
            "Allocations of nodes to competing jobs, by result.",
            ["result"],
            registry=self.registry,
        )
        self.allocation_seconds = Histogram(
            "heterotrain_operator_allocation_duration_seconds",
            "Seconds of one allocation for all jobs.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.limited_jobs = Gauge(
            "heterotrain_operator_limited_jobs",
            "Jobs with limited workers: other jobs compete for their nodes, or fewer workers are cheaper.",
            registry=self.registry,
        )
        self.moved_workers = Counter(
            "heterotrain_operator_moved_workers",
            "Workers that the allocation gave to or took from competing jobs, with the reason of the new grant.",
            ["change", "reason"],
            registry=self.registry,
        )
        self.plans = Counter("heterotrain_operator_plans_written", "Written plans.", registry=self.registry)
        self.plan_delivery_seconds = Histogram(
            "heterotrain_operator_plan_delivery_duration_seconds",
            "Seconds from a plan's decision until the pods that deliver it were patched.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.pods_created = Counter("heterotrain_operator_pods_created", "Created worker pods.", registry=self.registry)
        self.failures = Counter(
            "heterotrain_operator_worker_failures",
            "Failures of workers by their own fault; those within 30 s count once.",
            registry=self.registry,
        )
        self.disruptions = Counter(
            "heterotrain_operator_worker_disruptions", "Disrupted workers.", registry=self.registry
        )
        self.telemetry_reads = Counter(
            "heterotrain_operator_telemetry_reads",
            "Reads of telemetry from Prometheus, by result.",
            ["result"],
            registry=self.registry,
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
        self.listed_age = Gauge(
            "heterotrain_operator_list_age_seconds", "Seconds since the last full list.", registry=self.registry
        )
        self.clock_skew = Gauge(
            "heterotrain_operator_clock_skew_seconds",
            "Seconds by which the operator's clock is ahead of the API server's, whose time it uses.",
            registry=self.registry,
        )

    def note_queued(self, priority: Priority, seconds: float) -> None:
        """Note for how many seconds a job with this priority waited for its pass."""
        self.queue_seconds.labels(priority=priority).observe(seconds)
