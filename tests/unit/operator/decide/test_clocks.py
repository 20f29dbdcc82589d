"""Clocks that are ahead or behind: no wait lasts longer than its own length, and no other job is affected."""

from __future__ import annotations

import pytest
from heterotrain_operator.decide.waits import left_s
from support.fake_cluster import FakeCluster, a_running_job

HOUR_S, DAY_S = 3600.0, 86_400.0


def test_a_wait_ends_in_time_whatever_the_clocks_say() -> None:
    assert left_s(100.0, 30.0, now_s=110.0) == 20.0
    assert left_s(100.0, 30.0, now_s=131.0) == 0.0
    assert left_s(101.0, 30.0, now_s=100.0) == 30.0, "a second is no reason to end a wait"
    assert left_s(700.0, 30.0, now_s=100.0) == 0.0


@pytest.mark.parametrize("skew_s", [600.0, DAY_S])
def test_the_first_plan_comes_although_the_operator_s_clock_is_behind(skew_s: float) -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.settle()
    cluster.schedule().run("job-w0", "job-w1").set_ready("job-w2", ready=False)
    cluster.pass_time(-skew_s).settle()
    assert cluster.members() == ["job-w0", "job-w1"]


@pytest.mark.parametrize("skew_s", [HOUR_S, DAY_S])
def test_a_failed_worker_is_replaced_although_an_earlier_operator_s_clock_was_ahead(skew_s: float) -> None:
    cluster = a_running_job()
    cluster.pass_time(skew_s).end("job-w2", exit_code=1)
    cluster.step()
    cluster.pass_time(-skew_s).settle()
    assert "job-w3" not in cluster.pods
    cluster.pass_time(2.0).settle()
    assert "job-w3" in cluster.pods


def test_times_of_the_job_come_back_with_the_clock() -> None:
    """A start in the future would postpone every deadline."""
    cluster = FakeCluster(spec={"activeDeadlineSeconds": 100}).with_nodes("a", "b", "c").pass_time(DAY_S).start()
    cluster.pass_time(-DAY_S).settle()
    cluster.pass_time(99.0).settle()
    assert cluster.condition("Failed")[0] == "False"
    cluster.pass_time(2.0).settle()
    assert cluster.condition("Failed") == ("True", "DeadlineExceeded")
