"""The dashboard of a job, and the forms of its queries."""

from __future__ import annotations

from typing import Final

from lab.dashboard_form import Dashboard, Panel, Row

RATE: Final = "[$__rate_interval]"
_OF_JOB: Final = 'job_uid=~"$job"'
NAMED: Final = "job_uid, job_namespace, job_name"
_STEPS: Final = f"(sum by (worker, local_rank) (rate(heterotrain_steps_total{{{_OF_JOB}}}{RATE})) > 0)"


def of_job(name: str, *, phase: str = "") -> str:
    """Return a selector of a job's series."""
    chosen = f'{_OF_JOB},phase="{phase}"' if phase else _OF_JOB
    return f"{name}{{{chosen}}}"


def by_rank(name: str, *, phase: str = "") -> str:
    """Return the rate of a job's counter, for each rank."""
    return f"sum by (worker, local_rank) (rate({of_job(name, phase=phase)}{RATE}))"


def seconds_of(phase: str) -> str:
    """Return the seconds of a phase in a step, for each rank."""
    return f"{by_rank('heterotrain_phase_seconds_total', phase=phase)} / {_STEPS}"


def named(expression: str) -> str:
    """Return values by ``job_uid`` with the names of their jobs."""
    names = f"(0 * max by ({NAMED}) (heterotrain_operator_min_workers) + 1)"
    return f"({expression}) * on (job_uid) group_left (job_namespace, job_name) {names}"


def one(name: str) -> str:
    """Return a gauge that all replicas or ranks export alike."""
    return f"max({of_job(name)})"


_PHASES = ("load", "forward", "backward", "sync", "update")
_KNOWN: Final = "heterotrain_operator_min_workers"
"""A series that the operator exports for each job, with its name and namespace."""
_PODS = 'namespace="$namespace",pod=~"$name-w[0-9]+"'

_COMPUTING: Final = by_rank("heterotrain_phase_seconds_total", phase="compute")
_ACHIEVED: Final = f"sum(rate({of_job('heterotrain_samples_total')}{RATE}))"
_MEASURED = one("heterotrain_operator_measured_step_seconds")
_PREDICTED = one("heterotrain_operator_predicted_step_seconds")
_SOLO: Final = f"{by_rank('heterotrain_samples_total')} / ({_COMPUTING} > 0)"
"""What each rank would reach without waiting and exchange."""

JOB: Final = Dashboard(
    uid="heterotrain-job",
    title="heterotrain / job",
    variables=(
        {"name": "namespace", "label": "Namespace", "query": f"label_values({_KNOWN}, job_namespace)"},
        {
            "name": "name",
            "label": "Job",
            "query": f'label_values({_KNOWN}{{job_namespace="$namespace"}}, job_name)',
        },
        {
            "name": "job",
            "label": "Run (uid)",
            "query": f'label_values({_KNOWN}{{job_namespace="$namespace",job_name="$name"}}, job_uid)',
        },
    ),
    annotations=(
        (
            "Membership",
            f"max by (cause) (increase({of_job('heterotrain_membership_changes_total')}{RATE})) > 0",
            "orange",
        ),
        ("New plan", f"max(changes(heterotrain_plan_generation{{{_OF_JOB}}}{RATE})) > 0", "blue"),
        ("Pause", f"max(increase(heterotrain_pause_seconds_total{{{_OF_JOB}}}{RATE})) > 0", "red"),
    ),
    rows=(
        Row(
            title="Now",
            panels=(
                Panel(
                    kind="stat",
                    title="Samples/s now",
                    about="Of committed steps.",
                    queries=[(f"sum(rate({of_job('heterotrain_samples_total')}{RATE}))", "samples/s")],
                ),
                Panel(
                    kind="stat",
                    title="Efficiency now",
                    about="Achieved samples/s over the sum of solo rates.",
                    unit="percentunit",
                    queries=[(one("heterotrain_operator_efficiency_ratio"), "efficiency")],
                ),
                Panel(
                    kind="stat",
                    title="Speed-up now",
                    about="Achieved samples/s over those of the fastest rank alone.",
                    queries=[(f"{_ACHIEVED} / max({_SOLO})", "speed-up")],
                ),
                Panel(
                    kind="stat",
                    title="Workers placed",
                    about="On nodes, of the job's maximum.",
                    queries=[
                        (one("heterotrain_operator_placed_workers"), "placed"),
                        (one("heterotrain_operator_max_workers"), "maximum"),
                    ],
                ),
                Panel(
                    kind="stat",
                    title="Loss now",
                    about="Of the newest step, over all ranks.",
                    queries=[(one("heterotrain_loss"), "loss")],
                ),
                Panel(
                    kind="stat",
                    title="Step now",
                    about="The slowest rank's, from commit to commit.",
                    unit="s",
                    queries=[(f"max({seconds_of('step')})", "step")],
                ),
                Panel(
                    kind="stat",
                    title="Time since the newest checkpoint",
                    unit="s",
                    about="What would be trained again if all workers were lost.",
                    queries=[(f"time() - {one('heterotrain_checkpoint_timestamp_seconds')}", "age")],
                ),
            ),
        ),
        Row(
            title="Workers and shares",
            panels=(
                Panel(
                    kind="table",
                    title="Workers",
                    about="A row for each worker, with its share and where its step goes.",
                    queries=[
                        (f"sum by (worker) ({by_rank('heterotrain_samples_total')} / {_STEPS})", "share"),
                        (f"sum by (worker) ({by_rank('heterotrain_samples_total')})", "samples/s"),
                        (f"avg by (worker) ({seconds_of('compute')})", "own computation (s)"),
                        (f"avg by (worker) ({seconds_of('sync')})", "exchange and waiting (s)"),
                        (f"max by (worker) ({of_job('heterotrain_waiting_seconds')})", "waits for others (s)"),
                    ],
                ),
                Panel(
                    title="Share of each worker (samples per step)",
                    about="Sum over the worker's ranks.",
                    queries=[(f"sum by (worker) ({by_rank('heterotrain_samples_total')} / {_STEPS})", "{{worker}}")],
                ),
                Panel(
                    title="Own computation per step",
                    about="Equal for all workers where shares are right.",
                    unit="s",
                    queries=[(f"avg by (worker) ({seconds_of('compute')})", "{{worker}}")],
                ),
                Panel(
                    title="Exposed synchronisation per step",
                    about="Exchange that computation does not hide, and waiting for slower ranks.",
                    unit="s",
                    queries=[(f"avg by (worker) ({seconds_of('sync')})", "{{worker}}")],
                ),
                Panel(
                    title="Waiting for other ranks",
                    unit="s",
                    about="The rank that all others wait for is at 0.",
                    queries=[(f"max by (worker) ({of_job('heterotrain_waiting_seconds')})", "{{worker}}")],
                ),
                Panel(
                    title="Units of the model by worker",
                    queries=[
                        (
                            f"max by (worker, units) ({of_job('heterotrain_operator_worker_units')})",
                            "{{worker}}: {{units}}",
                        ),
                    ],
                    about="Pipelines only: how the model is cut. Own computation shows the time of each stage.",
                ),
                Panel(
                    title="Workers: maximum, granted, placed, minimum",
                    about="Granted: by the allocation among jobs. Placed: on nodes.",
                    queries=[
                        (one(f"heterotrain_operator_{kind}_workers"), name)
                        for kind, name in (
                            ("max", "maximum"),
                            ("granted", "granted"),
                            ("placed", "placed"),
                            ("min", "minimum"),
                        )
                    ],
                ),
            ),
        ),
        Row(
            title="Speed",
            panels=(
                Panel(
                    title="Throughput (samples/s)",
                    about="Samples of committed steps, and what the ranks would reach without waiting and exchange.",
                    queries=[
                        (_ACHIEVED, "achieved"),
                        (f"sum({_SOLO})", "sum of solo rates"),
                    ],
                ),
                Panel(
                    title="Speed-up over the fastest rank, and scaling efficiency",
                    about="Possible: without waiting and exchange. Scaling efficiency: achieved over possible.",
                    queries=[
                        (f"{_ACHIEVED} / max({_SOLO})", "speed-up"),
                        (f"sum({_SOLO}) / max({_SOLO})", "possible"),
                        (f"{_ACHIEVED} / sum({_SOLO})", "scaling efficiency"),
                    ],
                ),
                Panel(
                    title="Efficiency",
                    about="Achieved samples/s over the sum of solo rates.",
                    unit="percentunit",
                    queries=[
                        (one("heterotrain_operator_efficiency_ratio"), "measured"),
                        (one("heterotrain_operator_efficiency_ceiling_ratio"), "highest with the measured variances"),
                    ],
                ),
                Panel(
                    title="Step time: measured and predicted",
                    about="They should agree once a plan has been in force for some minutes.",
                    unit="s",
                    queries=[
                        (f"max({seconds_of('step')})", "measured now"),
                        (_PREDICTED, "predicted for the plan in force"),
                        (_MEASURED, "mean since it took effect"),
                    ],
                ),
                Panel(
                    title="Measured over predicted step time",
                    about="1 is exact; far from it, plans rest on wrong models.",
                    queries=[(f"{_MEASURED} / {_PREDICTED}", "measured / predicted")],
                ),
                Panel(
                    title="Phases of a step, mean over ranks",
                    about="Data, forward, backward, exposed exchange, optimizer.",
                    unit="s",
                    queries=[(f"avg({seconds_of(phase)})", phase) for phase in _PHASES],
                ),
            ),
        ),
        Row(
            title="Training",
            panels=(
                Panel(
                    title="Loss",
                    about="Of the newest step, over all ranks.",
                    queries=[(one("heterotrain_loss"), "loss")],
                ),
                Panel(
                    title="Values that the script reports",
                    about="Metrics of the script's hooks.",
                    queries=[(f"max by (name) ({of_job('heterotrain_user_metric')})", "{{name}}")],
                ),
                Panel(
                    title="Gradient noise scale and global batch (samples)",
                    about="A batch far above the noise scale uses samples badly.",
                    queries=[
                        (one("heterotrain_noise_scale_samples"), "noise scale"),
                        (one("heterotrain_global_batch_samples"), "global batch"),
                    ],
                ),
                Panel(
                    title="Steps that were not finite, and copies that differed",
                    about="Both should stay at 0.",
                    queries=[
                        (one("heterotrain_non_finite_steps_total"), "not finite"),
                        (one("heterotrain_divergences_total"), "copies differed"),
                    ],
                ),
            ),
        ),
        Row(
            title="Losses and checkpoints",
            panels=(
                Panel(
                    title="World size and membership changes",
                    about="Ranks that train together, and why their number changed.",
                    queries=[
                        (one("heterotrain_world_size"), "world size"),
                        (
                            f"max by (cause) (increase({of_job('heterotrain_membership_changes_total')}{RATE}))",
                            "{{cause}}",
                        ),
                    ],
                ),
                Panel(
                    title="Seconds lost to membership changes",
                    about="Since the start, by cause.",
                    unit="s",
                    queries=[(f"max by (cause) ({of_job('heterotrain_pause_seconds_total')})", "{{cause}}")],
                ),
                Panel(
                    title="Age of the newest checkpoint",
                    about="What would be trained again if all workers were lost.",
                    unit="s",
                    queries=[(f"time() - {one('heterotrain_checkpoint_timestamp_seconds')}", "age")],
                ),
            ),
        ),
        Row(
            title="Price",
            panels=(
                Panel(
                    title="Cost of a step, and of an hour (unit of pricePerHour)",
                    about="Empty for pools without a price.",
                    queries=[
                        (
                            (
                                f"{one('heterotrain_global_batch_samples')} / "
                                f"{one('heterotrain_operator_samples_per_price')}"
                            ),
                            "a step",
                        ),
                        (
                            (
                                f"3600 * sum(rate({of_job('heterotrain_samples_total')}{RATE})) / "
                                f"{one('heterotrain_operator_samples_per_price')}"
                            ),
                            "an hour",
                        ),
                    ],
                ),
                Panel(
                    title="Samples for one unit of price",
                    about="By the prices of the pools in use.",
                    queries=[(one("heterotrain_operator_samples_per_price"), "samples")],
                ),
            ),
        ),
        Row(
            title="Devices and network",
            panels=(
                Panel(
                    title="GPU utilisation",
                    unit="percentunit",
                    about="Part of the time in which a kernel ran: by the worker (NVML), and by DCGM's exporter.",
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
                    title="Peak memory of the device",
                    unit="percentunit",
                    about="Of tensors, in steps since the start. Empty on CPUs.",
                    queries=[
                        (
                            (
                                "max by (worker) (max by (worker, local_rank) "
                                f"({of_job('heterotrain_peak_memory_bytes')}) / "
                                f"max by (worker, local_rank) ({of_job('heterotrain_device_memory_bytes')}))"
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
                    about="Of each worker, by the driver.",
                    unit="celsius",
                    queries=[(f"max by (worker) ({of_job('heterotrain_gpu_temperature_celsius')})", "{{worker}}")],
                ),
                Panel(
                    title="Gradients that are summed",
                    unit="Bps",
                    about="Of each rank, as sent, in committed steps; a sum moves about twice that over the network.",
                    queries=[(by_rank("heterotrain_gradient_bytes_total"), "{{worker}}/{{local_rank}}")],
                ),
                Panel(
                    title="Network of the workers",
                    unit="Bps",
                    about="From the kubelets (cAdvisor), if Prometheus scrapes them.",
                    queries=[
                        (
                            f"sum by (pod) (rate(container_network_transmit_bytes_total{{{_PODS}}}{RATE}))",
                            "{{pod}} sends",
                        ),
                        (
                            f"sum by (pod) (rate(container_network_receive_bytes_total{{{_PODS}}}{RATE}))",
                            "{{pod}} receives",
                        ),
                    ],
                ),
            ),
        ),
    ),
)
