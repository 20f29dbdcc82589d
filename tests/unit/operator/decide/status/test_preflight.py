"""What workers find before they train reaches the job's conditions, its events and nobody's crash."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import metrics
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.vector import VectorSample
from support.fake_cluster import FakeCluster, a_running_job

DENIED = "s3://bucket/digits cannot be written and read (Forbidden): check its name, credentials, rights and network"


def with_checks(cluster: FakeCluster, *problems: tuple[int, str, str, float], passed: int = 4) -> FakeCluster:
    """Let all workers report; a problem has the number of its worker, check, message and value."""
    rows = []
    for number, pod in enumerate(cluster.pod_views):
        labels = {"worker": pod.name, "worker_uid": pod.uid, "local_rank": "0"}
        rows.append(VectorSample({"__name__": metrics.PREFLIGHT_PASSED, **labels}, passed))
        for at, check, message, value in problems:
            if at == number:
                own = {"__name__": metrics.PREFLIGHT_PROBLEM, "check": check, "message": message}
                rows.append(VectorSample({**own, **labels}, value))
    cluster.telemetry = Telemetry(gauges=parse_everything(rows).gauges, newest_sample_s=cluster.now_s)
    return cluster


def test_checks_that_found_nothing_are_told() -> None:
    cluster = with_checks(a_running_job())
    cluster.settle()
    assert cluster.condition("PreflightPassed") == ("True", "ChecksPassed")


def test_nothing_is_told_before_the_checks_have_ended() -> None:
    cluster = a_running_job()
    cluster.settle()
    assert cluster.condition("PreflightPassed") == ("Unknown", "NotReported")


def test_a_failure_is_told_once_with_its_workers_and_before_limits() -> None:
    small = (0, "shared memory", "/dev/shm has 64 MiB", metrics.PREFLIGHT_WARNING)
    store = [(number, "store", DENIED, metrics.PREFLIGHT_FAILURE) for number in range(2)]
    cluster = with_checks(a_running_job(), small, *store)
    cluster.settle()
    cluster.settle()
    assert cluster.condition("PreflightPassed") == ("False", "CheckFailed")
    said = f"store: {DENIED} (job-w0, job-w1); shared memory: /dev/shm has 64 MiB (job-w0)"
    assert cluster.message("PreflightPassed") == said
    assert cluster.events.count("PreflightFailed") == 1
    assert cluster.status["state"] == "Running", "a check stops nothing"


def test_a_limit_fails_nothing() -> None:
    small = (1, "shared memory", "/dev/shm has 64 MiB", metrics.PREFLIGHT_WARNING)
    cluster = with_checks(a_running_job(), small)
    cluster.settle()
    assert cluster.condition("PreflightPassed") == ("True", "LimitsFound")
    assert cluster.message("PreflightPassed") == "shared memory: /dev/shm has 64 MiB (job-w1)"
    assert "PreflightFailed" not in cluster.events


def test_the_answer_outlives_the_workers() -> None:
    cluster = with_checks(a_running_job(), (0, "store", DENIED, metrics.PREFLIGHT_FAILURE))
    cluster.settle()
    cluster.telemetry = Telemetry()
    for name in cluster.members():
        cluster.end(name, Ending.FINISHED, reason="done")
    cluster.settle()
    assert cluster.status["state"] == "Succeeded"
    assert cluster.condition("PreflightPassed") == ("False", "CheckFailed")


@pytest.mark.parametrize(
    ("check", "message", "value"),
    [
        ("c" * 41, "m", 2.0),
        ("", "m", 2.0),
        ("store", "m" * 241, 2.0),
        ("store", "two\nlines", 2.0),
        ("st\x1bore", "m", 2.0),
        ("store", "m", 3.0),
    ],
)
def test_odd_series_are_dropped(check: str, message: str, value: float) -> None:
    cluster = with_checks(a_running_job(), (0, check, message, value))
    cluster.settle()
    assert cluster.condition("PreflightPassed") == ("True", "ChecksPassed")


def test_a_worker_that_reports_many_problems_fills_no_status() -> None:
    many = [(0, "store", f"problem {number:03}", metrics.PREFLIGHT_FAILURE) for number in range(200)]
    cluster = with_checks(a_running_job(), *many)
    cluster.settle()
    assert cluster.message("PreflightPassed").endswith("and 12 more")
