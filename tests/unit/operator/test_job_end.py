"""How a job ends or pauses: success, clean-up, time to live, suspension, deadlines."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.outcome import Ending
from operator_world import World, a_running_job


def test_finished_workers_end_the_job() -> None:
    world = a_running_job()
    for name in world.members():
        world.end(name, Ending.FINISHED, reason="7 epochs are committed")
    world.settle()
    assert world.status["state"] == "Succeeded"
    assert world.condition("Succeeded") == ("True", "Finished")
    assert world.condition("Ready") == ("True", "Finished")
    assert world.status["progress"] == "100%"
    assert sorted(world.pods) == ["job-w0", "job-w1", "job-w2"], "ended pods stay for their logs"


def test_exit_code_zero_alone_is_no_success() -> None:
    world = a_running_job()
    for name in world.members():
        world.end(name, exit_code=0)
    world.settle()
    assert world.status["state"] != "Succeeded"
    assert world.status["restarts"] == 3
    assert "heterotrain-run" in world.status["lastFailure"]


def test_a_straggler_gets_a_moment_after_the_first_has_finished() -> None:
    world = a_running_job()
    world.end("job-w0", Ending.FINISHED)
    world.settle()
    assert world.status["state"] == "Running"
    assert world.status["disruptions"] == 0
    world.pass_time(31)
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_no_worker_is_made_once_training_is_over() -> None:
    world = World(spec={"elasticPolicy": {"minReplicas": 2}}).with_nodes("a", "b").start()
    world.end("job-w0", Ending.FINISHED)
    world.with_nodes("c")
    assert "job-w2" in world.pods
    world.settle()
    assert "job-w2" not in world.pods


@pytest.mark.parametrize(
    ("policy", "left"),
    [("None", ["job-w0", "job-w1", "job-w2"]), ("Running", ["job-w0", "job-w1", "job-w2"]), ("All", [])],
)
def test_clean_pod_policy_for_ended_pods(policy: str, left: list[str]) -> None:
    world = a_running_job(cleanPodPolicy=policy)
    for name in world.members():
        world.end(name, Ending.FINISHED)
    world.settle()
    assert sorted(world.pods) == left


@pytest.mark.parametrize(("policy", "deleting"), [("None", False), ("Running", True), ("All", True)])
def test_clean_pod_policy_for_pods_that_still_run(policy: str, deleting: bool) -> None:
    world = a_running_job(cleanPodPolicy=policy, backoffLimit=0)
    world.end("job-w0", Ending.FAILED, exit_code=1)
    world.settle()
    assert ("deletionTimestamp" in world.pods["job-w1"]["metadata"]) is deleting


def test_time_to_live_deletes_the_job_after_its_end_is_in_the_status() -> None:
    world = a_running_job(ttlSecondsAfterFinished=60)
    for name in world.members():
        world.end(name, Ending.FINISHED)
    world.settle()
    assert not world.deleted_job
    world.pass_time(61)
    world.step()
    assert world.deleted_job


def test_a_time_to_live_of_zero_still_reports_the_end_first() -> None:
    world = a_running_job(ttlSecondsAfterFinished=0)
    for name in world.members():
        world.end(name, Ending.FINISHED)
    world.step()
    assert not world.deleted_job
    assert world.status["completionTime"]
    world.step()
    assert world.deleted_job


def test_suspend_removes_all_workers_and_resume_goes_on_above_the_old_plan() -> None:
    world = a_running_job()
    version = world.version()
    world.edit(lambda spec: spec.update(suspend=True))
    world.settle()
    assert all("deletionTimestamp" in body["metadata"] for body in world.pods.values())
    assert world.condition("Ready") == ("False", "Suspended")
    for name in list(world.pods):
        world.end(name, Ending.LEFT)
        world.vanish(name)
    world.settle()
    assert world.status["state"] == "Suspended"
    assert world.condition("Ready") == ("True", "Suspended")
    assert "startTime" not in world.status
    world.edit(lambda spec: spec.update(suspend=False)).pass_time(100)
    world.start()
    assert world.version()[0] == version[0] + 1
    assert world.status["state"] == "Running"
    assert world.status["disruptions"] == 0
    assert world.status["restarts"] == 0
    assert world.notices.count("Resumed") == 1


def test_the_deadline_counts_from_the_start() -> None:
    world = a_running_job(activeDeadlineSeconds=100)
    world.pass_time(101)
    world.settle()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")


def test_a_job_that_never_begins_fails_by_its_own_deadline_and_one_that_began_does_not() -> None:
    waiting = World(spec={"preRunningDeadlineSeconds": 50})
    waiting.settle()
    waiting.pass_time(51)
    waiting.settle()
    assert waiting.condition("Failed") == ("True", "PreRunningDeadlineExceeded")
    running = a_running_job(preRunningDeadlineSeconds=50)
    running.pass_time(51)
    running.settle()
    assert running.status["state"] == "Running"
