"""The trainer's counters of numerical problems reach the job's conditions and events, whatever their values."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.prom.queries import Series, parse_everything
from support.fake_cluster import FakeCluster, a_running_job


def with_counters(cluster: FakeCluster, **counters: float) -> FakeCluster:
    names = {"infinite": metrics.NON_FINITE_STEPS, "differed": metrics.DIVERGENCES, "step": metrics.STEP}
    labels = {"worker": "job-w0", "worker_uid": cluster.pod_views[0].uid, "local_rank": "0"}
    rows = [Series({"__name__": names[name], **labels}, value) for name, value in counters.items()]
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
