"""The dashboards for Grafana: cluster, job and operator. ``make generate`` writes them into the chart."""

from __future__ import annotations

from typing import Final

from lab.dashboard_form import Dashboard, Panel, Row
from lab.dashboard_job import JOB, NAMED, RATE, named

_JOB_NAME = "{{job_namespace}}/{{job_name}}"

CLUSTER: Final = Dashboard(
    uid="heterotrain-cluster",
    title="heterotrain / cluster",
    rows=(
        Row(
            title="Jobs",
            panels=(
                Panel(
                    title="Throughput of each job (samples/s)",
                    about="Samples of committed steps.",
                    queries=[(named(f"sum by (job_uid) (rate(heterotrain_samples_total{RATE}))"), _JOB_NAME)],
                ),
                Panel(
                    title="Efficiency of each job",
                    about="Achieved samples/s over the sum of solo rates.",
                    unit="percentunit",
                    queries=[(f"max by ({NAMED}) (heterotrain_operator_efficiency_ratio)", _JOB_NAME)],
                ),
                Panel(
                    title="Jobs that do not train, do not progress, or are late",
                    about="A line for each such job; describe says why.",
                    queries=[
                        (f"max by ({NAMED}) (heterotrain_operator_running) == 0", f"{_JOB_NAME}: does not train"),
                        (f"max by ({NAMED}) (heterotrain_operator_progressing) == 0", f"{_JOB_NAME}: no progress"),
                        (f"max by ({NAMED}) (heterotrain_operator_deadline_at_risk) == 1", f"{_JOB_NAME}: late"),
                        (f"max by ({NAMED}) (heterotrain_operator_failed) == 1", f"{_JOB_NAME}: failed"),
                    ],
                ),
                Panel(
                    title="Price of an hour (unit of pricePerHour)",
                    about="Of jobs whose pools have prices.",
                    queries=[
                        (
                            (
                                f"3600 * {named(f'sum by (job_uid) (rate(heterotrain_samples_total{RATE}))')} / "
                                f"on ({NAMED}) max by ({NAMED}) (heterotrain_operator_samples_per_price)"
                            ),
                            _JOB_NAME,
                        )
                    ],
                ),
            ),
        ),
        Row(
            title="Workers",
            panels=(
                Panel(
                    title="Workers on nodes",
                    about="Of each job.",
                    queries=[(f"max by ({NAMED}) (heterotrain_operator_placed_workers)", _JOB_NAME)],
                ),
                Panel(
                    title="Workers that jobs lack",
                    about="The maximum less the workers on nodes.",
                    queries=[
                        (
                            (
                                f"max by ({NAMED}) (heterotrain_operator_max_workers) - "
                                f"max by ({NAMED}) (heterotrain_operator_placed_workers)"
                            ),
                            _JOB_NAME,
                        )
                    ],
                ),
                Panel(
                    title="Workers moved by the allocation",
                    about="Given to or taken from jobs, by reason.",
                    queries=[
                        (
                            f"sum by (change, reason) (increase(heterotrain_operator_moved_workers_total{RATE}))",
                            "{{change}}: {{reason}}",
                        )
                    ],
                ),
                Panel(
                    title="Lost workers",
                    about="Disruptions are the cluster's, failures the job's. Nodes left out are avoided.",
                    queries=[
                        (f"sum(increase(heterotrain_operator_worker_disruptions_total{RATE}))", "disruptions"),
                        (f"sum(increase(heterotrain_operator_worker_failures_total{RATE}))", "failures"),
                        ("max(heterotrain_operator_held_nodes)", "nodes left out"),
                    ],
                ),
            ),
        ),
    ),
)


def _p95(name: str, labels: str = "") -> str:
    return f"histogram_quantile(0.95, sum by (le) (rate({name}_bucket{labels}{RATE})))"


OPERATOR: Final = Dashboard(
    uid="heterotrain-operator",
    title="heterotrain / operator",
    rows=(
        Row(
            title="Health",
            panels=(
                Panel(
                    title="Leader, jobs, worker pods",
                    about="One replica leads.",
                    queries=[
                        ("sum(heterotrain_operator_leader)", "leaders"),
                        ("max(heterotrain_operator_jobs)", "jobs"),
                        ("max(heterotrain_operator_pods)", "worker pods"),
                    ],
                ),
                Panel(
                    title="Internal errors",
                    about="Faults of the operator itself, by part of a pass.",
                    queries=[
                        (f"sum by (part) (increase(heterotrain_operator_internal_errors_total{RATE}))", "{{part}}")
                    ],
                ),
                Panel(
                    title="Passes over jobs (per s)",
                    about="By result.",
                    queries=[(f"sum by (result) (rate(heterotrain_operator_reconcile_total{RATE}))", "{{result}}")],
                ),
                Panel(
                    title="Duration, 95th percentile",
                    about="docs/operating.md has the limits to watch.",
                    unit="s",
                    queries=[
                        (
                            _p95("heterotrain_operator_queue_duration_seconds", '{priority="urgent"}'),
                            "wait of urgent jobs",
                        ),
                        (_p95("heterotrain_operator_reconcile_duration_seconds"), "pass"),
                        (_p95("heterotrain_operator_decision_duration_seconds"), "decision"),
                        (_p95("heterotrain_operator_allocation_duration_seconds"), "allocation"),
                        (_p95("heterotrain_operator_plan_delivery_duration_seconds"), "delivery of a plan"),
                        (_p95("heterotrain_operator_event_loop_delay_seconds"), "delay of the event loop"),
                    ],
                ),
                Panel(
                    title="Jobs waiting for a pass, limited jobs",
                    about="Limited: jobs whose passes are delayed because they come too often.",
                    queries=[
                        ("max(heterotrain_operator_workqueue_depth)", "waiting"),
                        ("max(heterotrain_operator_limited_jobs)", "limited"),
                    ],
                ),
            ),
        ),
        Row(
            title="Its neighbours",
            panels=(
                Panel(
                    title="Reads of telemetry (per s)",
                    about="Queries to Prometheus, by result.",
                    queries=[
                        (f"sum by (result) (rate(heterotrain_operator_telemetry_reads_total{RATE}))", "{{result}}")
                    ],
                ),
                Panel(
                    title="Created pods and written plans (per s)",
                    about="Writes to the API server.",
                    queries=[
                        (f"sum(rate(heterotrain_operator_pods_created_total{RATE}))", "pods"),
                        (f"sum(rate(heterotrain_operator_plans_written_total{RATE}))", "plans"),
                    ],
                ),
                Panel(
                    title="Age of the last full list, difference of clocks",
                    about="Both should be small against a minute.",
                    unit="s",
                    queries=[
                        ("max(heterotrain_operator_list_age_seconds)", "list"),
                        ("max(abs(heterotrain_operator_clock_skew_seconds))", "clocks"),
                    ],
                ),
            ),
        ),
    ),
)

ALL: Final = {"cluster": CLUSTER, "job": JOB, "operator": OPERATOR}
