"""Dashboards on a real Prometheus, compared with the truth, with one rank and with eight ranks in a pod."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.prom import vector
from heterotrain_operator.prom.queries import series_and_times_of
from heterotrain_operator.prom.series_map import parse_everything
from support.helm import CHART
from support.real_prometheus import START_S, RealPrometheus, real_prometheus

pytestmark = pytest.mark.needs_program("prometheus", "helm")

Labels = tuple[tuple[str, str], ...]
Series = dict[Labels, Callable[[float], float]]

DURATION_S = 300
STEP_S = 0.1
SHARE = {"a": 16, "b": 8}
"""Samples of one rank in a step, by worker."""
COMPUTE_S = {"a": 0.08, "b": 0.04}
WAITING_S = {"a": 0.0, "b": 7.5}
GPU_BUSY = {"a": 0.9, "b": 0.4}
CHECKPOINT_S = 100.0
"""Time of the newest checkpoint, in seconds since the start."""


def name(series: str, **labels: str) -> Labels:
    return (("__name__", series), *sorted(labels.items()))


def constant(value: float) -> Callable[[float], float]:
    return lambda _: value


def rising(per_s: float) -> Callable[[float], float]:
    return lambda time_s: per_s * time_s


def of_job(uid: str, ranks: int) -> Series:
    """Return the series of a job with two workers, as its ranks and the operator export them."""
    found: Series = {}
    for worker, share in SHARE.items():
        for rank in range(ranks):
            # Pods of different jobs have the same names here: only the uid tells the jobs apart.
            identity = {"job_uid": uid, "worker": worker, "worker_uid": f"{uid}-{worker}", "local_rank": str(rank)}
            shape = {**identity, "share": str(share), "micro_batch": str(share)}
            found |= {
                name("heterotrain_samples_total", **shape): rising(share / STEP_S),
                name("heterotrain_steps_total", **shape): rising(1 / STEP_S),
                name("heterotrain_loss", **identity): constant(0.5),
                name("heterotrain_non_finite_steps_total", **identity): constant(4),
                name("heterotrain_divergences_total", **identity): constant(1),
                name("heterotrain_user_metric", **identity, name="accuracy"): constant(0.9),
                name("heterotrain_world_size", **identity): constant(len(SHARE) * ranks),
                name("heterotrain_membership_changes_total", **identity, cause="loss"): rising(2 / 60),
                name("heterotrain_pause_seconds_total", **identity, cause="loss"): constant(12.5),
                name("heterotrain_checkpoint_timestamp_seconds", **identity): constant(START_S + CHECKPOINT_S),
                name("heterotrain_noise_scale_samples", **identity): constant(3000),
                name("heterotrain_global_batch_samples", **identity): constant(sum(SHARE.values()) * ranks),
                name("heterotrain_waiting_seconds", **identity): constant(WAITING_S[worker]),
                name("heterotrain_plan_generation", **identity): lambda time_s: time_s // 60,
                name("heterotrain_peak_memory_bytes", **shape): constant(6e9 + rank),
                name("heterotrain_device_memory_bytes", **identity): constant(16e9),
                name("heterotrain_gpu_utilization_ratio", **identity): constant(GPU_BUSY[worker]),
                name("heterotrain_gpu_memory_used_bytes", **identity): constant(4e9 + 1e9 * rank),
                name("heterotrain_gpu_memory_total_bytes", **identity): constant(16e9),
                name("heterotrain_gradient_bytes_total", **identity): rising(3e6),
                name("heterotrain_gpu_power_watts", **identity): constant(250),
                name("heterotrain_gpu_temperature_celsius", **identity): constant(60 + rank),
            }
            seconds = {
                "load": 0.01, "forward": 0.02, "backward": COMPUTE_S[worker] - 0.035, "update": 0.005,
                "compute": COMPUTE_S[worker], "sync": STEP_S - COMPUTE_S[worker], "step": STEP_S,
            }  # fmt: skip
            for phase, of_step_s in seconds.items():
                found[name("heterotrain_phase_seconds_total", **shape, phase=phase)] = rising(of_step_s / STEP_S)
    gauges = {
        "predicted_step_seconds": 0.11, "measured_step_seconds": 0.12,
        "efficiency_ratio": 0.9, "efficiency_ceiling_ratio": 0.95,
        "max_workers": 4, "granted_workers": 3, "placed_workers": 2, "min_workers": 1,
        "samples_per_price": 5e6, "deadline_at_risk": 1, "diverging": 0, "running": 0, "progressing": 0, "failed": 1,
    }  # fmt: skip
    operator = {"job_uid": uid, "job_name": uid, "job_namespace": "team"}
    for worker, units, held in (("a", "0-17", 18), ("b", "18-23", 6)):
        labels = {**operator, "worker": worker, "pool": worker, "units": units}
        found[name("heterotrain_operator_worker_units", **labels)] = constant(held)
    for number in range(2):  # NVIDIA's exporter and the kubelets name pods
        pod = f"{uid}-w{number}"
        found[name("DCGM_FI_DEV_GPU_UTIL", namespace="team", pod=pod, gpu="0")] = constant(60.0)
        found[name("DCGM_FI_DEV_GPU_UTIL", namespace="team", pod=pod, gpu="1")] = constant(80.0)
        found[name("container_network_transmit_bytes_total", namespace="team", pod=pod, interface="eth0")] = rising(1e6)
        found[name("container_network_receive_bytes_total", namespace="team", pod=pod, interface="eth0")] = rising(2e6)
    return found | {name(f"heterotrain_operator_{key}", **operator): constant(value) for key, value in gauges.items()}


def of_operator() -> Series:
    """Return the operator's own series: two replicas, of which one leads."""
    found: Series = {
        name("heterotrain_operator_moved_workers_total", change="taken", reason="Fair"): rising(1 / 60),
        name("heterotrain_operator_reconcile_total", result="ok"): rising(2.0),
        name("heterotrain_operator_telemetry_reads_total", result="ok"): rising(3.0),
        name("heterotrain_operator_internal_errors_total", part="the shares"): rising(1 / 60),
        name("heterotrain_operator_pods_created_total"): rising(0.5),
        name("heterotrain_operator_plans_written_total"): rising(0.25),
        name("heterotrain_operator_worker_disruptions_total"): rising(2 / 60),
        name("heterotrain_operator_worker_failures_total"): rising(1 / 60),
    }
    gauges = {"limited_jobs": 1, "leader": 1, "jobs": 2, "pods": 4, "workqueue_depth": 5}
    gauges |= {"list_age_seconds": 40, "clock_skew_seconds": -2}
    found |= {name(f"heterotrain_operator_{key}", pod="a"): constant(value) for key, value in gauges.items()}
    found |= {name(f"heterotrain_operator_{key}", pod="b"): constant(0) for key in gauges}
    for kind in ("reconcile", "decision", "allocation", "plan_delivery", "event_loop_delay"):
        series = f"heterotrain_operator_{kind}{'' if kind == 'event_loop_delay' else '_duration'}_seconds_bucket"
        for limit, per_s in (("0.1", 0.9), ("1.0", 1.0), ("+Inf", 1.0)):
            found[name(series, le=limit)] = rising(per_s)
            for priority, factor in (("urgent", 1.0), ("routine", 50.0)):
                queued = name("heterotrain_operator_queue_duration_seconds_bucket", le=limit, priority=priority)
                found[queued] = rising(factor if limit != "0.1" else 0.9)
    return found


BOTH = sum(SHARE.values())
RANKS = {"one": 1, "eight": 8}
Answers = dict[str, dict[str, float]]


def expected_of_job(job: str) -> Answers:
    """Return the truth of the dashboard of a job, by title and letter of a query, and by the labels of the lines."""
    ranks = RANKS[job]
    rate, pods = BOTH * ranks / STEP_S, [f"{job}-w{number}" for number in range(2)]
    backward = {worker: seconds - 0.035 for worker, seconds in COMPUTE_S.items()}
    solo = {worker: SHARE[worker] / COMPUTE_S[worker] for worker in SHARE}
    fastest, possible = max(solo.values()), sum(solo.values()) * ranks
    phases = {"load": 0.01, "forward": 0.02, "backward": sum(backward.values()) / 2, "sync": 0.04, "update": 0.005}
    return {
        "Samples/s now": {"A": rate},
        "Efficiency now": {"A": 0.9},
        "Speed-up now": {"A": rate / fastest},
        "Speed-up over the fastest rank, and scaling efficiency": {
            "A": rate / fastest, "B": possible / fastest, "C": rate / possible,
        },
        "Workers placed": {"A": 2.0, "B": 4.0},
        "Loss now": {"A": 0.5},
        "Step now": {"A": STEP_S},
        "Time since the newest checkpoint": {"A": DURATION_S - CHECKPOINT_S},
        "Workers": {
            **{f"A {worker}": float(share * ranks) for worker, share in SHARE.items()},
            **{f"B {worker}": share * ranks / STEP_S for worker, share in SHARE.items()},
            **{f"C {worker}": seconds for worker, seconds in COMPUTE_S.items()},
            **{f"D {worker}": STEP_S - seconds for worker, seconds in COMPUTE_S.items()},
            **{f"E {worker}": seconds for worker, seconds in WAITING_S.items()},
        },
        "Share of each worker (samples per step)": {"A a": 16.0 * ranks, "A b": 8.0 * ranks},
        "Throughput (samples/s)": {"A": rate, "B": possible},
        "Phases of a step, mean over ranks": dict(zip("ABCDE", phases.values(), strict=True)),
        "Step time: measured and predicted": {"A": STEP_S, "B": 0.11, "C": 0.12},
        "Own computation per step": {f"A {worker}": seconds for worker, seconds in COMPUTE_S.items()},
        "Units of the model by worker": {"A 0-17/a": 18.0, "A 18-23/b": 6.0},
        "Exposed synchronisation per step": {f"A {worker}": STEP_S - value for worker, value in COMPUTE_S.items()},
        "Loss": {"A": 0.5},
        "Values that the script reports": {"A accuracy": 0.9},
        "Gradient noise scale and global batch (samples)": {"A": 3000.0, "B": float(BOTH * ranks)},
        "Efficiency": {"A": 0.9, "B": 0.95},
        "World size and membership changes": {"A": 2.0 * ranks, "B loss": 2.0},
        "Seconds lost to membership changes": {"A loss": 12.5},
        "Workers: maximum, granted, placed, minimum": {"A": 4.0, "B": 3.0, "C": 2.0, "D": 1.0},
        "Cost of a step, and of an hour (unit of pricePerHour)": {
            "A": BOTH * ranks / 5e6, "B": 3600 * rate / 5e6,
        },
        "Samples for one unit of price": {"A": 5e6},
        "Measured over predicted step time": {"A": 0.12 / 0.11},
        "Age of the newest checkpoint": {"A": DURATION_S - CHECKPOINT_S},
        "Waiting for other ranks": {f"A {worker}": value for worker, value in WAITING_S.items()},
        "Steps that were not finite, and copies that differed": {"A": 4.0, "B": 1.0},
        "Peak memory of the device": {"A a": (6e9 + ranks - 1) / 16e9, "A b": (6e9 + ranks - 1) / 16e9},
        "GPU utilisation": (
            {f"A {worker}": busy for worker, busy in GPU_BUSY.items()} | {f"B {pod}": 0.7 for pod in pods}
        ),
        "Memory of the GPUs in use": dict.fromkeys(("A a", "A b"), (3 + ranks) / 16),
        "Power of the GPUs": dict.fromkeys(("A a", "A b"), 250.0 * ranks),
        "Temperature of the hottest GPU": dict.fromkeys(("A a", "A b"), 59.0 + ranks),
        "Gradients that are summed": {f"A {rank}/{worker}": 3e6 for worker in SHARE for rank in range(ranks)},
        "Network of the workers": {f"A {pod}": 1e6 for pod in pods} | {f"B {pod}": 2e6 for pod in pods},
        "Membership": {"A loss": 2.0},
        "New plan": {"A": 1.0},
        "Pause": {},
    }  # fmt: skip


def expected_of_cluster() -> Answers:
    def each(value: Callable[[str], float], letter: str = "A") -> dict[str, float]:
        return {f"{letter} {job}/team/{job}": value(job) for job in RANKS}

    def rate(job: str) -> float:
        return BOTH * RANKS[job] / STEP_S

    return {
        "Throughput of each job (samples/s)": each(rate),
        "Efficiency of each job": each(lambda _: 0.9),
        "Workers on nodes": each(lambda _: 2.0),
        "Workers that jobs lack": each(lambda _: 2.0),
        "Price of an hour (unit of pricePerHour)": each(lambda job: 3600 * rate(job) / 5e6),
        "Jobs that do not train, do not progress, or are late": (
            each(lambda _: 0.0) | each(lambda _: 0.0, "B") | each(lambda _: 1.0, "C") | each(lambda _: 1.0, "D")
        ),
        "Workers moved by the allocation": {"A taken/Fair": 1.0},
        "Lost workers": {"A": 2.0, "B": 1.0},
    }


def expected_of_operator() -> Answers:
    return {
        "Leader, jobs, worker pods": {"A": 1.0, "B": 2.0, "C": 4.0},
        "Passes over jobs (per s)": {"A ok": 2.0},
        "Duration, 95th percentile": dict.fromkeys("ABCDEF", 0.55),
        "Jobs waiting for a pass, limited jobs": {"A": 5.0, "B": 1.0},
        "Reads of telemetry (per s)": {"A ok": 3.0},
        "Internal errors": {"A the shares": 1.0},
        "Created pods and written plans (per s)": {"A": 0.5, "B": 0.25},
        "Age of the last full list, difference of clocks": {"A": 40.0, "B": 2.0},
    }


def dashboard(which: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / f"files/dashboards/{which}.json").read_text())
    return found


def queries(which: str) -> dict[str, list[tuple[str, str]]]:
    """Return the queries of a dashboard, each with its letter, by the title of the panel or the annotation."""
    found = dashboard(which)
    panels = {
        panel["title"]: [(t["refId"], t["expr"]) for t in panel["targets"]]
        for panel in found["panels"]
        if "targets" in panel
    }
    return panels | {each["name"]: [("A", each["expr"])] for each in found["annotations"]["list"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPrometheus]:
    """Jobs with one and with eight ranks in a pod, in one Prometheus."""
    with real_prometheus(tmp_path_factory.mktemp("dashboard")) as found:
        times_s = range(0, DURATION_S + 1, 5)
        for series in (of_job("one", 1), of_job("eight", 8), of_operator()):
            found.write(series, times_s)
        yield found


CASES: list[tuple[str, str, str, dict[str, float]]] = [
    *(("job", job, title, truth) for job in RANKS for title, truth in expected_of_job(job).items()),
    *(("cluster", "", title, truth) for title, truth in expected_of_cluster().items()),
    *(("operator", "", title, truth) for title, truth in expected_of_operator().items()),
]


@pytest.mark.parametrize("which", ["job", "cluster", "operator"])
def test_every_query_of_a_dashboard_has_an_expected_answer(which: str) -> None:
    assert queries(which).keys() == {title for of, _, title, _ in CASES if of == which}


@pytest.mark.parametrize(("which", "job", "title", "truth"), CASES, ids=[f"{c[0]} {c[1]} {c[2]}" for c in CASES])
def test_a_panel_shows_the_truth_whatever_the_number_of_ranks(
    server: RealPrometheus, which: str, job: str, title: str, truth: dict[str, float]
) -> None:
    answer = {}
    for letter, expr in queries(which)[title]:
        promql = (
            expr.replace("$job", job)
            .replace("$namespace", "team")
            .replace("$name", job)
            .replace("$__rate_interval", "1m")
        )
        for labels, value in server.query(promql, DURATION_S).items():
            answer[" ".join(filter(None, [letter, "/".join(found for _, found in labels)]))] = value
    assert answer == pytest.approx(truth)


def test_a_job_is_selected_by_its_namespace_its_name_and_its_run(server: RealPrometheus) -> None:
    """Jobs of the same name in two namespaces are two, and no name is a part of another."""
    known = "heterotrain_operator_min_workers"
    for namespace, job, uid in (("a", "digits", "u1"), ("b", "digits", "u2"), ("a", "digits-big", "u3")):
        labels = {"job_namespace": namespace, "job_name": job, "job_uid": uid}
        server.write({name(known, **labels): constant(1)}, range(0, 1, 5))
    asked = {"$namespace": "a", "$name": "digits"}
    answers = []
    for variable in dashboard("job")["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
        assert found is not None
        selector = found[1]
        for written, value in asked.items():
            selector = selector.replace(written, value)
        answers.append(
            {dict(labels).get(found[2]) for labels in server.query(selector, 0)}
            & {"a", "b", "digits", "digits-big", "u1", "u2", "u3"}
        )
    assert answers == [{"a", "b"}, {"digits", "digits-big"}, {"u1"}]


def test_one_query_of_the_operator_brings_a_job_s_series_and_the_times_of_its_scrapes(server: RealPrometheus) -> None:
    """Prometheus leaves out rows on the right of ``or`` with the labels of a row on the left, whatever their names."""
    identity = {"job_uid": "read", "worker": "read-w0", "worker_uid": "uid-a", "local_rank": "0"}
    written = {name("heterotrain_ready", **identity): constant(1), name("heterotrain_step", **identity): constant(7)}
    server.write(written, range(0, 11, 5))
    answer = server.query(series_and_times_of("read"), 12)
    found = parse_everything([vector.VectorSample(dict(labels), value) for labels, value in answer.items()])
    assert {member: gauges.step for member, gauges in found.gauges.items()} == {MemberId("uid-a", 0): 7}
    assert found.times == {MemberId("uid-a", 0): START_S + 10}
