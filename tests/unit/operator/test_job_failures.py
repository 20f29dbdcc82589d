"""Workers that fail: what is charged to the job, how long it waits, and when it gives up."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.outcome import Ending
from operator_world import World, a_running_job


def replaced(world: World, *, after_s: float) -> None:
    """Let an end be noticed, and once the wait is over another worker take its place and run."""
    world.settle()
    world.pass_time(after_s)
    world.settle()
    world.schedule().run()
    world.settle()


def test_own_failures_count_and_wait_longer_and_longer() -> None:
    world = a_running_job()
    world.end("job-w0", Ending.FAILED, exit_code=1, reason="ValueError: no such file")
    decision = world.step()
    assert world.status["restarts"] == 1
    assert world.status["lastFailure"] == "job-w0: ValueError: no such file"
    assert decision.create == ()
    assert decision.again_s == pytest.approx(2.0)
    world.pass_time(2)
    assert [body["metadata"]["name"] for body in world.step().create] == ["job-w3"]
    world.schedule().run()
    world.settle()
    world.end("job-w3", Ending.FAILED, exit_code=1, reason="again")
    assert world.step().again_s == pytest.approx(4.0)
    assert world.status["restarts"] == 2


def test_a_failed_pod_stays_for_its_log_and_is_counted_once() -> None:
    world = a_running_job()
    world.end("job-w0", Ending.FAILED, exit_code=1, reason="boom")
    for _ in range(5):
        world.pass_time(10)
        world.step()
    assert "job-w0" in world.pods
    assert world.status["restarts"] == 1


def test_beyond_the_backoff_limit_the_job_fails_with_the_last_reason() -> None:
    world = a_running_job(backoffLimit=0)
    world.end("job-w0", Ending.FAILED, exit_code=1, reason="boom")
    world.settle()
    assert world.status["state"] == "Failed"
    assert world.condition("Failed") == ("True", "BackoffLimitExceeded")
    assert "boom" in world.status["reason"]
    assert world.condition("Stalled") == ("True", "BackoffLimitExceeded")
    assert world.status["completionTime"]


def test_a_worker_that_is_killed_at_once_is_not_replaced_at_once() -> None:
    """Whatever killed it may go on killing: without a pause, workers would be made and killed in a hot loop."""
    world = a_running_job()
    world.pass_time(3)
    world.end("job-w0", exit_code=137)
    decision = world.step()
    assert decision.create == ()
    assert decision.again_s == pytest.approx(10.0)
    assert "job-w0" in world.pods
    world.pass_time(11)
    world.settle()
    assert sorted(world.pods) == ["job-w1", "job-w2", "job-w3"]


def test_a_probe_that_fails_for_ever_fails_the_job() -> None:
    """The kubelet tells the worker to go, which it does in order, again and again; nothing else wants it to go."""
    probe = {"exec": {"command": ["false"]}}
    template = {"spec": {"containers": [{"name": "main", "image": "image", "livenessProbe": probe}]}}
    world = a_running_job(backoffLimit=2, template=template)
    for _ in range(3):
        assert world.status["state"] == "Running"
        world.end(world.members()[0], Ending.LEFT, told=True)
        replaced(world, after_s=300)
    assert world.status["restarts"] == 3
    assert world.condition("Failed") == ("True", "BackoffLimitExceeded")
    assert "livenessProbe" in world.status["reason"]


def test_disruptions_never_fail_a_job() -> None:
    world = a_running_job(backoffLimit=0)
    for _ in range(4):
        world.end(world.members()[0], exit_code=137, pod_reason="NodeShutdown")
        replaced(world, after_s=30)
    assert world.status["disruptions"] == 4
    assert world.status["restarts"] == 0
    assert world.status["state"] == "Running"
