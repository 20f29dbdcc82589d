"""The trainer's counters of numerical problems reach the job's conditions and events, whatever their values."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import metrics
from heterotrain_core.contract.outcome import Cause, Ending
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.vector import VectorSample
from support.fake_cluster import FakeCluster, a_running_job


def with_counters(cluster: FakeCluster, **counters: float) -> FakeCluster:
    names = {
        "infinite": metrics.NON_FINITE_STEPS, "differed": metrics.DIVERGENCES, "step": metrics.STEP,
        "at": metrics.NON_FINITE_STEP, "loss": metrics.LAST_FINITE_LOSS,
    }  # fmt: skip
    labels = {"worker": "job-w0", "worker_uid": cluster.pod_views[0].uid, "local_rank": "0"}
    rows = [VectorSample({"__name__": names[name], **labels}, value) for name, value in counters.items()]
    cluster.telemetry = Telemetry(gauges=parse_everything(rows).gauges, newest_sample_s=cluster.now_s)
    return cluster


@pytest.mark.parametrize(
    ("counters", "expected", "advice"),
    [
        ({"infinite": 0, "differed": 0}, ("True", "Sound"), ""),
        ({"infinite": 3}, ("False", "NotFinite"), "of 3 steps was infinite or NaN: lower the learning rate"),
        ({"differed": 2, "infinite": 3}, ("False", "CopiesDiffered"), "differed in 2 comparisons: look for code"),
        ({"infinite": -1.0, "differed": 1e300, "step": 1}, ("True", "Sound"), ""),
        ({}, ("Unknown", "NotReported"), ""),
    ],
)
def test_numerical_problems_are_a_condition(counters: dict[str, float], expected: tuple[str, str], advice: str) -> None:
    cluster = with_counters(a_running_job(), **counters)
    cluster.settle()
    assert cluster.condition("NumericallySound") == expected
    assert advice in cluster.message("NumericallySound")
    assert ("NumbersUnsound" in cluster.events) == (expected[0] == "False")
    assert cluster.events.count("NumbersUnsound") <= 1


def test_the_step_and_the_last_finite_loss_are_named() -> None:
    cluster = with_counters(a_running_job(), infinite=3, at=17, loss=0.25)
    cluster.settle()
    assert "was infinite or NaN, last in step 17; the last finite loss was 0.25: lower" in cluster.message(
        "NumericallySound"
    )


@pytest.mark.parametrize("cause", [Cause.NOT_FINITE, Cause.COPIES_DIFFERED])
def test_a_job_that_failed_for_its_numbers_says_so(cause: Cause) -> None:
    """The failed workers' own words hold the step, the last finite loss and the remedy."""
    cluster = a_running_job(backoffLimit=0)
    for name in cluster.members():
        cluster.end(name, Ending.FAILED, exit_code=1, reason="the loss of step 4 is not finite", cause=cause)
    cluster.settle()
    assert cluster.status["state"] == "Failed"
    assert cluster.condition("NumericallySound") == ("False", cause.value)
    assert "job-w0: the loss of step 4 is not finite" in cluster.message("NumericallySound")
    assert cluster.events.count("NumbersUnsound") == 1
