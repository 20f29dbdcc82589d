"""The dashboards for Grafana: cluster, job and operator. ``make generate`` writes them into the chart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_RATE: Final = "[$__rate_interval]"
_OF_JOB: Final = 'job_uid=~"$job"'
_NAMED: Final = "job_uid, job_namespace, job_name"
_STEPS: Final = f"(sum by (worker, local_rank) (rate(heterotrain_steps_total{{{_OF_JOB}}}{_RATE})) > 0)"
WIDTH: Final = 12
HEIGHT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel with curves.

    Attributes:
        title: with the unit where it is not a standard one.
        queries: (PromQL, legend), the first one with letter A.
        unit: as Grafana names it.
        about: a sentence for its help.
    """

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A dashboard: variables, annotations, and panels from left to right and top to bottom."""

    uid: str
    title: str
    panels: Sequence[Panel]
    variables: Sequence[dict[str, Any]] = ()
    annotations: Sequence[tuple[str, str, str]] = field(default=())
    """Name, PromQL and colour of each."""


def of_job(name: str, *, phase: str = "") -> str:
    """Return a selector of a job's series."""
    chosen = f'{_OF_JOB},phase="{phase}"' if phase else _OF_JOB
    return f"{name}{{{chosen}}}"


def by_rank(name: str, *, phase: str = "") -> str:
    """Return the rate of a job's counter, for each rank."""
    return f"sum by (worker, local_rank) (rate({of_job(name, phase=phase)}{_RATE}))"


def seconds_of(phase: str) -> str:
    """Return the seconds of a phase in a step, for each rank."""
    return f"{by_rank('heterotrain_phase_seconds_total', phase=phase)} / {_STEPS}"


def named(expression: str) -> str:
    """Return values by ``job_uid`` with the names of their jobs."""
    names = f"(0 * max by ({_NAMED}) (heterotrain_operator_min_workers) + 1)"
    return f"({expression}) * on (job_uid) group_left (job_namespace, job_name) {names}"


def one(name: str) -> str:
    """Return a gauge that all replicas or ranks export alike."""
    return f"max({of_job(name)})"


_JOB_NAME = "{{job_namespace}}/{{job_name}}"
_PHASES = ("load", "forward", "backward", "sync", "update")
_PODS = 'pod=~"$name-w[0-9]+"'

_COMPUTING: Final = by_rank("heterotrain_phase_seconds_total", phase="compute")

JOB: Final = Dashboard(
    uid="heterotrain-job",
    title="heterotrain / job",
    variables=(
        {
            "name": "name",
            "label": "Job",
            "query": "label_values(heterotrain_ready, worker)",
            "regex": "/^(.*)-w[0-9]+$/",
        },
        {
            "name": "job",
            "label": "Run (uid)",
            "query": 'label_values(heterotrain_ready{worker=~"$name-w[0-9]+"}, job_uid)',
        },
    ),
    annotations=(
        (
            "Membership",
            f"max by (cause) (increase({of_job('heterotrain_membership_changes_total')}{_RATE})) > 0",
            "orange",
        ),
        ("New plan", f"max(changes(heterotrain_plan_generation{{{_OF_JOB}}}{_RATE})) > 0", "blue"),
        ("Pause", f"max(increase(heterotrain_pause_seconds_total{{{_OF_JOB}}}{_RATE})) > 0", "red"),
    ),
    panels=(
        Panel(
            title="Share of each worker (samples per step)",
            about="Sum over the worker's ranks.",
            queries=[(f"sum by (worker) ({by_rank('heterotrain_samples_total')} / {_STEPS})", "{{worker}}")],
        ),
        Panel(
            title="Throughput (samples/s)",
            queries=[
                (f"sum(rate({of_job('heterotrain_samples_total')}{_RATE}))", "achieved"),
                (f"sum({by_rank('heterotrain_samples_total')} / ({_COMPUTING} > 0))", "sum of solo rates"),
            ],
        ),
        Panel(
            title="Phases of a step, mean over ranks",
            unit="s",
            queries=[(f"avg({seconds_of(phase)})", phase) for phase in _PHASES],
        ),
        Panel(
            title="Step time: measured and predicted",
            unit="s",
            queries=[
                (f"max({seconds_of('step')})", "measured now"),
                (one("heterotrain_operator_predicted_step_seconds"), "predicted for the plan in force"),
                (one("heterotrain_operator_measured_step_seconds"), "mean since it took effect"),
            ],
        ),
        Panel(
            title="Own computation per step",
            unit="s",
            queries=[(f"avg by (worker) ({seconds_of('compute')})", "{{worker}}")],
        ),
        Panel(
            title="Units of the model by worker",
            queries=[
                (f"max by (worker, units) ({of_job('heterotrain_operator_worker_units')})", "{{worker}}: {{units}}"),
            ],
            about="Pipelines only: how the model is cut. Own computation per step shows the time of each stage.",
        ),
        Panel(
            title="Exposed synchronisation per step",
            unit="s",
            queries=[(f"avg by (worker) ({seconds_of('sync')})", "{{worker}}")],
        ),
        Panel(title="Loss", queries=[(one("heterotrain_loss"), "loss")]),
        Panel(
            title="Values that the script reports",
            queries=[(f"max by (name) ({of_job('heterotrain_user_metric')})", "{{name}}")],
        ),
        Panel(
            title="Gradient noise scale and global batch (samples)",
            queries=[
                (one("heterotrain_noise_scale_samples"), "noise scale"),
                (one("heterotrain_global_batch_samples"), "global batch"),
            ],
        ),
        Panel(
            title="Efficiency",
            unit="percentunit",
            queries=[
                (one("heterotrain_operator_efficiency_ratio"), "measured"),
                (one("heterotrain_operator_predicted_efficiency_ratio"), "predicted"),
                (one("heterotrain_operator_efficiency_ceiling_ratio"), "highest with the measured variances"),
            ],
        ),
        Panel(
            title="World size and membership changes",
            queries=[
                (one("heterotrain_world_size"), "world size"),
                (
                    f"max by (cause) (increase({of_job('heterotrain_membership_changes_total')}{_RATE}))",
                    "{{cause}}",
                ),
            ],
        ),
        Panel(
            title="Seconds lost to membership changes",
            unit="s",
            queries=[(f"max by (cause) ({of_job('heterotrain_pause_seconds_total')})", "{{cause}}")],
        ),
        Panel(
            title="Workers: maximum, granted, placed, minimum",
            queries=[
                (one(f"heterotrain_operator_{kind}_workers"), name)
                for kind, name in (("max", "maximum"), ("granted", "granted"), ("placed", "placed"), ("min", "minimum"))
            ],
        ),
        Panel(
            title="Cost of a step, and of an hour (unit of pricePerHour)",
            queries=[
                (
                    f"{one('heterotrain_global_batch_samples')} / {one('heterotrain_operator_samples_per_price')}",
                    "a step",
                ),
                (
                    (
                        f"3600 * sum(rate({of_job('heterotrain_samples_total')}{_RATE})) / "
                        f"{one('heterotrain_operator_samples_per_price')}"
                    ),
                    "an hour",
                ),
            ],
        ),
        Panel(
            title="Samples for one unit of price", queries=[(one("heterotrain_operator_samples_per_price"), "samples")]
        ),
        Panel(
            title="Measured over predicted step time",
            queries=[(one("heterotrain_operator_measured_over_predicted_ratio"), "measured / predicted")],
        ),
        Panel(
            title="Age of the newest checkpoint",
            unit="s",
            queries=[(f"time() - {one('heterotrain_checkpoint_timestamp_seconds')}", "age")],
        ),
        Panel(
            title="Waiting for other ranks",
            unit="s",
            about="The rank that all others wait for is at 0.",
            queries=[(f"max by (worker) ({of_job('heterotrain_waiting_seconds')})", "{{worker}}")],
        ),
        Panel(
            title="Steps that were not finite, and copies that differed",
            queries=[
                (one("heterotrain_non_finite_steps_total"), "not finite"),
                (one("heterotrain_divergences_total"), "copies differed"),
            ],
        ),
        Panel(
            title="Peak memory of the device",
            unit="percentunit",
            about="Of tensors, in steps since the start. Empty on CPUs.",
            queries=[
                (
                    (
                        f"max by (worker) (max by (worker, local_rank) ({of_job('heterotrain_peak_memory_bytes')}) / "
                        f"max by (worker, local_rank) ({of_job('heterotrain_device_memory_bytes')}))"
                    ),
                    "{{worker}}",
                )
            ],
        ),
        Panel(
            title="GPU utilisation",
            unit="percentunit",
            about="Part of the time in which a kernel ran: by the worker itself (NVML), and by DCGM's exporter.",
            queries=[
                (f"avg by (worker) ({of_job('heterotrain_gpu_utilization_ratio')})", "{{worker}}"),
                (f"avg by (pod) (DCGM_FI_DEV_GPU_UTIL{{{_PODS}}}) / 100", "{{pod}} (DCGM)"),
            ],
        ),
        Panel(
            title="Memory of the GPUs in use",
            unit="percentunit",
            about="Of all processes, by the driver; the fullest GPU of each worker.",
            queries=[
                (
                    (
                        f"max by (worker) ({of_job('heterotrain_gpu_memory_used_bytes')} / "
                        f"{of_job('heterotrain_gpu_memory_total_bytes')})"
                    ),
                    "{{worker}}",
                )
            ],
        ),
        Panel(
            title="Power of the GPUs",
            unit="watt",
            about="Sum over the GPUs of each worker.",
            queries=[(f"sum by (worker) ({of_job('heterotrain_gpu_power_watts')})", "{{worker}}")],
        ),
        Panel(
            title="Temperature of the hottest GPU",
            unit="celsius",
            queries=[(f"max by (worker) ({of_job('heterotrain_gpu_temperature_celsius')})", "{{worker}}")],
        ),
        Panel(
            title="Network of the workers",
            unit="Bps",
            about="From the kubelets (cAdvisor), if Prometheus scrapes them.",
            queries=[
                (f"sum by (pod) (rate(container_network_transmit_bytes_total{{{_PODS}}}{_RATE}))", "{{pod}} sends"),
                (f"sum by (pod) (rate(container_network_receive_bytes_total{{{_PODS}}}{_RATE}))", "{{pod}} receives"),
            ],
        ),
    ),
)

CLUSTER: Final = Dashboard(
    uid="heterotrain-cluster",
    title="heterotrain / cluster",
    panels=(
        Panel(
            title="Throughput of each job (samples/s)",
            queries=[(named(f"sum by (job_uid) (rate(heterotrain_samples_total{_RATE}))"), _JOB_NAME)],
        ),
        Panel(
            title="Efficiency of each job",
            unit="percentunit",
            queries=[(f"max by ({_NAMED}) (heterotrain_operator_efficiency_ratio)", _JOB_NAME)],
        ),
        Panel(
            title="Workers on nodes",
            queries=[(f"max by ({_NAMED}) (heterotrain_operator_placed_workers)", _JOB_NAME)],
        ),
        Panel(
            title="Workers that jobs lack",
            about="The maximum less the workers on nodes.",
            queries=[
                (
                    (
                        f"max by ({_NAMED}) (heterotrain_operator_max_workers) - "
                        f"max by ({_NAMED}) (heterotrain_operator_placed_workers)"
                    ),
                    _JOB_NAME,
                )
            ],
        ),
        Panel(
            title="Price of an hour (unit of pricePerHour)",
            queries=[
                (
                    (
                        f"3600 * {named(f'sum by (job_uid) (rate(heterotrain_samples_total{_RATE}))')} / "
                        f"on ({_NAMED}) max by ({_NAMED}) (heterotrain_operator_samples_per_price)"
                    ),
                    _JOB_NAME,
                )
            ],
        ),
        Panel(
            title="Jobs that do not train, do not progress, or are late",
            queries=[
                (f"max by ({_NAMED}) (heterotrain_operator_running) == 0", f"{_JOB_NAME}: does not train"),
                (f"max by ({_NAMED}) (heterotrain_operator_progressing) == 0", f"{_JOB_NAME}: no progress"),
                (f"max by ({_NAMED}) (heterotrain_operator_deadline_at_risk) == 1", f"{_JOB_NAME}: late"),
                (f"max by ({_NAMED}) (heterotrain_operator_failed) == 1", f"{_JOB_NAME}: failed"),
            ],
        ),
        Panel(
            title="Workers moved by the allocation",
            queries=[
                (
                    f"sum by (change, reason) (increase(heterotrain_operator_moved_workers_total{_RATE}))",
                    "{{change}}: {{reason}}",
                )
            ],
        ),
        Panel(
            title="Lost workers",
            queries=[
                (f"sum(increase(heterotrain_operator_worker_disruptions_total{_RATE}))", "disruptions"),
                (f"sum(increase(heterotrain_operator_worker_failures_total{_RATE}))", "failures"),
                ("max(heterotrain_operator_held_nodes)", "nodes left out"),
            ],
        ),
    ),
)


def _p95(name: str, labels: str = "") -> str:
    return f"histogram_quantile(0.95, sum by (le) (rate({name}_bucket{labels}{_RATE})))"


OPERATOR: Final = Dashboard(
    uid="heterotrain-operator",
    title="heterotrain / operator",
    panels=(
        Panel(
            title="Leader, jobs, worker pods",
            queries=[
                ("sum(heterotrain_operator_leader)", "leaders"),
                ("max(heterotrain_operator_jobs)", "jobs"),
                ("max(heterotrain_operator_pods)", "worker pods"),
            ],
        ),
        Panel(
            title="Passes over jobs (per s)",
            queries=[(f"sum by (result) (rate(heterotrain_operator_reconcile_total{_RATE}))", "{{result}}")],
        ),
        Panel(
            title="Duration, 95th percentile",
            unit="s",
            queries=[
                (_p95("heterotrain_operator_queue_duration_seconds", '{priority="urgent"}'), "wait of urgent jobs"),
                (_p95("heterotrain_operator_reconcile_duration_seconds"), "pass"),
                (_p95("heterotrain_operator_decision_duration_seconds"), "decision"),
                (_p95("heterotrain_operator_allocation_duration_seconds"), "allocation"),
                (_p95("heterotrain_operator_plan_delivery_duration_seconds"), "delivery of a plan"),
                (_p95("heterotrain_operator_event_loop_delay_seconds"), "delay of the event loop"),
            ],
        ),
        Panel(
            title="Jobs waiting for a pass, limited jobs",
            queries=[
                ("max(heterotrain_operator_workqueue_depth)", "waiting"),
                ("max(heterotrain_operator_limited_jobs)", "limited"),
            ],
        ),
        Panel(
            title="Reads of telemetry (per s)",
            queries=[(f"sum by (result) (rate(heterotrain_operator_telemetry_reads_total{_RATE}))", "{{result}}")],
        ),
        Panel(
            title="Internal errors",
            queries=[(f"sum by (part) (increase(heterotrain_operator_internal_errors_total{_RATE}))", "{{part}}")],
        ),
        Panel(
            title="Created pods and written plans (per s)",
            queries=[
                (f"sum(rate(heterotrain_operator_pods_created_total{_RATE}))", "pods"),
                (f"sum(rate(heterotrain_operator_plans_written_total{_RATE}))", "plans"),
            ],
        ),
        Panel(
            title="Age of the last full list, difference of clocks",
            unit="s",
            queries=[
                ("max(heterotrain_operator_list_age_seconds)", "list"),
                ("max(abs(heterotrain_operator_clock_skew_seconds))", "clocks"),
            ],
        ),
    ),
)

ALL: Final = {"cluster": CLUSTER, "job": JOB, "operator": OPERATOR}


def text(dashboard: Dashboard) -> str:
    """Return a dashboard as Grafana imports it."""
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    variables += [
        {"type": "query", "datasource": _DATASOURCE, "refresh": 2, "sort": 1, **each} for each in dashboard.variables
    ]
    return json.dumps(
        {
            "title": dashboard.title, "uid": dashboard.uid, "schemaVersion": 39, "version": 1, "editable": True,
            "tags": ["heterotrain"], "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
            "links": [{"type": "dashboards", "tags": ["heterotrain"], "title": "heterotrain", "keepTime": True}],
            "annotations": {"list": [
                {"name": name, "datasource": _DATASOURCE, "enable": True, "iconColor": colour, "expr": expr,
                 "titleFormat": name, "textFormat": "{{cause}}", "step": "15s"}
                for name, expr, colour in dashboard.annotations
            ]},
            "templating": {"list": variables},
            "panels": list(_panels(dashboard.panels)),
        },
        indent=1,
    ) + "\n"  # fmt: skip


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    for number, panel in enumerate(panels):
        yield {
            "id": number + 1, "type": "timeseries", "title": panel.title, "description": panel.about,
            "datasource": _DATASOURCE,
            "gridPos": {"h": HEIGHT, "w": WIDTH, "x": WIDTH * (number % 2), "y": HEIGHT * (number // 2)},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            "targets": [
                {"refId": chr(ord("A") + at), "expr": expr, "legendFormat": legend}
                for at, (expr, legend) in enumerate(panel.queries)
            ],
        }  # fmt: skip
