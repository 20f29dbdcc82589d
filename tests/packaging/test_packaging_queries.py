"""Dashboard and alerts on a real Prometheus, compared with the truth, with one rank and with eight ranks in a pod."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.helm import CHART, HELM, of_kind, render
from support.real_prometheus import PROMETHEUS, START_S, RealPrometheus, real_prometheus

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or HELM is None, reason="prometheus or helm is not installed: run `make cluster` once"
)

Labels = tuple[tuple[str, str], ...]
Series = dict[Labels, Callable[[float], float]]

DURATION_S = 300
STEP_S = 0.1
SHARE = {"a": 16, "b": 8}
"""Samples of one rank in a step, by worker."""
COMPUTE_S = {"a": 0.08, "b": 0.04}
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
            }
            seconds = {"compute": COMPUTE_S[worker], "sync": STEP_S - COMPUTE_S[worker], "step": STEP_S}
            for phase, of_step_s in seconds.items():
                found[name("heterotrain_phase_seconds_total", **shape, phase=phase)] = rising(of_step_s / STEP_S)
    gauges = {
        "predicted_step_seconds": 0.11, "measured_step_seconds": 0.12, "measured_over_predicted_ratio": 1.05,
        "efficiency_ratio": 0.9, "predicted_efficiency_ratio": 0.92, "efficiency_ceiling_ratio": 0.95,
        "max_workers": 4, "granted_workers": 3, "placed_workers": 2, "min_workers": 1,
        "samples_per_price": 5e6, "deadline_at_risk": 1,
    }  # fmt: skip
    operator = {"job_uid": uid, "job_name": uid, "job_namespace": "team"}
    return found | {name(f"heterotrain_operator_{key}", **operator): constant(value) for key, value in gauges.items()}


def of_operator() -> Series:
    found: Series = {
        name("heterotrain_operator_moved_workers_total", change="taken", reason="Fair"): rising(1 / 60),
        name("heterotrain_operator_limited_jobs"): constant(1),
        name("heterotrain_operator_leader"): constant(1),
    }
    for limit, per_s in (("0.1", 0.9), ("1.0", 1.0), ("+Inf", 1.0)):
        found[name("heterotrain_operator_allocation_duration_seconds_bucket", le=limit)] = rising(per_s)
    return found


def expected(ranks: int) -> dict[str, dict[str, float]]:
    """Return the truth, by the panel and letter of a query, and by the labels of the lines."""
    both = sum(SHARE.values())
    return {
        "1A": {"a": 16.0 * ranks, "b": 8.0 * ranks},
        "2A": {"": both * ranks / STEP_S},
        "2B": {"": sum(SHARE[worker] / COMPUTE_S[worker] for worker in SHARE) * ranks},
        "3A": COMPUTE_S,
        "4A": {worker: STEP_S - seconds for worker, seconds in COMPUTE_S.items()},
        "5A": {"": STEP_S}, "5B": {"": 0.11}, "5C": {"": 0.12},
        "6A": {"": 0.5}, "6B": {"accuracy": 0.9},
        "7A": {"": 2.0 * ranks}, "7B": {"loss": 2.0},
        "8A": {"loss": 12.5},
        "9A": {"": DURATION_S - CHECKPOINT_S},
        "10A": {"": 3000.0}, "10B": {"": float(both * ranks)},
        "11A": {"": 1.05},
        "12A": {"": 0.9}, "12B": {"": 0.92}, "12C": {"": 0.95},
        "13A": {"": 4.0}, "13B": {"": 3.0}, "13C": {"": 2.0}, "13D": {"": 1.0},
        "14A": {"": 5e6},
        "15A": {"taken/Fair": 1.0},
        "16A": {"": 0.55}, "16B": {"": 1.0}, "16C": {"": 1.0},
        "17A": {"": 4.0}, "17B": {"": 1.0},
    }  # fmt: skip


def queries() -> dict[str, str]:
    """Return the queries of the dashboard by panel and letter."""
    panels = json.loads((CHART / "files/dashboard.json").read_text())["panels"]
    return {f"{panel['id']}{each['refId']}": each["expr"] for panel in panels for each in panel["targets"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPrometheus]:
    """Jobs with one and with eight ranks in a pod, in one Prometheus."""
    with real_prometheus(tmp_path_factory.mktemp("dashboard")) as found:
        times_s = range(0, DURATION_S + 1, 5)
        for series in (of_job("one", 1), of_job("eight", 8), of_operator()):
            found.write(series, times_s)
        yield found


def test_every_query_of_the_dashboard_has_an_expected_answer() -> None:
    assert queries().keys() == expected(1).keys()


@pytest.mark.parametrize("query", expected(1))
@pytest.mark.parametrize(("job", "ranks"), [("one", 1), ("eight", 8)])
def test_a_panel_shows_the_truth_whatever_the_number_of_ranks(
    server: RealPrometheus, query: str, job: str, ranks: int
) -> None:
    promql = queries()[query].replace("$job", job).replace("$__rate_interval", "1m")
    answer = {
        "/".join(value for _, value in labels): value for labels, value in server.query(promql, DURATION_S).items()
    }
    assert answer == pytest.approx(expected(ranks)[query])


@cache
def alerts(*values: str) -> dict[str, Any]:
    (rules,) = of_kind(render("monitoring.prometheusRule.enabled=true", *values), "PrometheusRule")
    return {rule["alert"]: rule for group in rules["spec"]["groups"] for rule in group["rules"]}


def rank(uid: str, number: str = "0") -> dict[str, str]:
    return {"job_uid": uid, "worker": "w0", "worker_uid": f"{uid}-w0", "local_rank": number}


def job(uid: str) -> dict[str, str]:
    return {"job_uid": uid, "job_name": uid, "job_namespace": "team"}


def situation() -> Series:
    """Return series in which everything is wrong with the job "bad", and nothing with the job "good"."""
    return {
        name("heterotrain_step", **rank("bad")): constant(7),
        name("heterotrain_step", **rank("good")): rising(1),
        name("heterotrain_plan_revision", **rank("bad")): constant(3),
        name("heterotrain_plan_revision", **rank("bad", "1")): constant(4),
        name("heterotrain_plan_revision", **rank("good")): constant(4),
        name("heterotrain_plan_revision", **rank("good", "1")): constant(4),
        name("heterotrain_operator_measured_over_predicted_ratio", **job("bad")): constant(0.8),
        name("heterotrain_operator_measured_over_predicted_ratio", **job("good")): constant(1.05),
        name("heterotrain_checkpoint_failures_total", **rank("bad")): rising(1 / 60),
        name("heterotrain_checkpoint_failures_total", **rank("good")): constant(2),
        name("heterotrain_non_finite_steps_total", **rank("bad")): rising(1 / 60),
        name("heterotrain_non_finite_steps_total", **rank("good")): constant(2),
        name("heterotrain_divergences_total", **rank("bad")): rising(1 / 60),
        name("heterotrain_divergences_total", **rank("good")): constant(0),
        name("heterotrain_operator_clock_skew_seconds", pod="right"): constant(-2.0),
        name("heterotrain_operator_clock_skew_seconds", pod="wrong"): constant(-86_400.0),
        name("heterotrain_operator_granted_workers", **job("bad")): constant(1),
        name("heterotrain_operator_granted_workers", **job("good")): constant(2),
        name("heterotrain_operator_min_workers", **job("bad")): constant(2),
        name("heterotrain_operator_min_workers", **job("good")): constant(2),
        name("heterotrain_operator_deadline_at_risk", **job("bad")): constant(1),
        name("heterotrain_operator_deadline_at_risk", **job("good")): constant(0),
        name("heterotrain_operator_progressing", **job("bad")): constant(0),
        name("heterotrain_operator_progressing", **job("good")): constant(1),
        name("heterotrain_operator_held_nodes", pod="right"): constant(0),
        name("heterotrain_operator_held_nodes", pod="wrong"): constant(2),
        name("heterotrain_operator_internal_errors_total", part="the shares"): rising(1 / 60),
        name("heterotrain_operator_internal_errors_total", part="the events"): constant(3),
    }


OPERATOR_DOWN = "HeteroTrainOperatorDown"
OPERATOR_BUG = "HeteroTrainOperatorBug"
CLOCK_SKEW = "HeteroTrainClockSkew"
NODES_FLAP = "HeteroTrainNodesFlap"
OF_JOBS = (
    "HeteroTrainJobStuck", "HeteroTrainNotProgressing",
    "HeteroTrainPlanNotApplied", "HeteroTrainPredictionOff", "HeteroTrainCheckpointFailing",
    "HeteroTrainJobWaitingForNodes", "HeteroTrainDeadlineAtRisk", "HeteroTrainNotFinite", "HeteroTrainCopiesDiffered",
)  # fmt: skip


def test_every_alert_is_tested() -> None:
    assert set(alerts()) == {*OF_JOBS, OPERATOR_DOWN, OPERATOR_BUG, CLOCK_SKEW, NODES_FLAP}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPrometheus]:
    with real_prometheus(tmp_path_factory.mktemp("alerts")) as found:
        found.write(situation(), range(0, 1801, 30))
        yield found


@pytest.mark.parametrize("alert", OF_JOBS)
def test_an_alert_names_the_job_that_it_is_about_and_no_other(wrong: RealPrometheus, alert: str) -> None:
    found = wrong.query(alerts()[alert]["expr"], 1800)
    assert {dict(labels)["job_uid"] for labels in found} == {"bad"}


def test_a_new_internal_error_raises_an_alert_that_names_the_part(wrong: RealPrometheus) -> None:
    assert [dict(labels) for labels in wrong.query(alerts()[OPERATOR_BUG]["expr"], 1800)] == [{"part": "the shares"}]


def test_a_wrong_clock_of_one_operator_raises_an_alert(wrong: RealPrometheus) -> None:
    assert [dict(labels) for labels in wrong.query(alerts()[CLOCK_SKEW]["expr"], 1800)] == [{"pod": "wrong"}]


def test_nodes_that_flap_raise_an_alert(wrong: RealPrometheus) -> None:
    assert [dict(labels)["pod"] for labels in wrong.query(alerts()[NODES_FLAP]["expr"], 1800)] == ["wrong"]


@pytest.mark.parametrize("alert", [*OF_JOBS, OPERATOR_BUG, CLOCK_SKEW, NODES_FLAP])
def test_the_text_of_an_alert_names_only_labels_that_it_has(wrong: RealPrometheus, alert: str) -> None:
    """A label that the expression drops would leave a gap in the text."""
    rule = alerts()[alert]
    named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    for labels in wrong.query(rule["expr"], 1800):
        assert named <= dict(labels).keys()
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["labels"]["severity"] in ("info", "warning", "critical")


@pytest.mark.parametrize("scraped", ["true", "false"], ids=["scraped by the chart", "not scraped by the chart"])
def test_a_lost_leader_raises_an_alert(tmp_path: Path, scraped: str) -> None:
    expr = alerts(f"monitoring.serviceMonitor.enabled={scraped}")[OPERATOR_DOWN]["expr"]
    with real_prometheus(tmp_path) as server:
        server.write({name("heterotrain_operator_leader", pod="old"): constant(1)}, range(0, 601, 30))
        assert server.query(expr, 600) == {}
        server.write({name("heterotrain_operator_leader", pod="new"): constant(0)}, range(1200, 1801, 30))
        assert len(server.query(expr, 1800)) == 1


def test_an_operator_that_never_appears_raises_an_alert_only_where_the_chart_has_it_scraped(
    wrong: RealPrometheus,
) -> None:
    def firing(scraped: str) -> int:
        return len(wrong.query(alerts(f"monitoring.serviceMonitor.enabled={scraped}")[OPERATOR_DOWN]["expr"], 1800))

    assert (firing("true"), firing("false")) == (1, 0)
