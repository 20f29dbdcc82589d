"""How a job ends or pauses: success, clean-up, time to live, suspension, deadlines."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.outcome import Ending
from support.fake_cluster import FakeCluster, a_running_job


def test_finished_workers_end_the_job() -> None:
    cluster = a_running_job()
    for name in cluster.members():
        cluster.end(name, Ending.FINISHED, reason="7 epochs are committed")
    cluster.settle()
    assert cluster.status["state"] == "Succeeded"
    assert cluster.condition("Succeeded") == ("True", "Completed")
    assert cluster.condition("Ready") == ("True", "Completed")
    assert cluster.status["progress"] == "100%"
    assert sorted(cluster.pods) == ["job-w0", "job-w1", "job-w2"], "ended pods stay for their logs"


def test_exit_code_zero_alone_is_not_a_success() -> None:
    cluster = a_running_job()
    for name in cluster.members():
        cluster.end(name, exit_code=0)
    cluster.settle()
    assert cluster.status["state"] != "Succeeded"
    assert cluster.status["restarts"] == 1, "workers that fail together are one incident"
    assert "job.finish" in cluster.status["lastFailure"]


def plain_job(**spec: object) -> FakeCluster:
    """Return a job whose workers run, but never reach ``job.steps``."""
    cluster = FakeCluster(spec=dict(spec)).with_nodes("a", "b", "c")
    cluster.settle()
    cluster.schedule().run(ready=False)
    cluster.settle()
    return cluster


def test_a_script_without_heterotrain_succeeds_once_all_its_copies_have_ended() -> None:
    cluster = plain_job()
    cluster.end("job-w0", exit_code=0)
    cluster.settle()
    cluster.pass_time(3600).settle()
    assert cluster.status["state"] not in ("Succeeded", "Failed"), "the other copies take their time"
    assert "2 copies still run" in cluster.message("Running")
    assert not any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    for name in ("job-w1", "job-w2"):
        cluster.end(name, exit_code=0)
    cluster.settle()
    assert cluster.status["state"] == "Succeeded"
    assert cluster.status["restarts"] == 0
    assert "did not call heterotrain.init(); each of the 3 workers ran a copy" in cluster.message("Succeeded")


def test_a_failed_copy_fails_a_script_without_heterotrain() -> None:
    cluster = plain_job()
    cluster.end("job-w0", exit_code=0)
    cluster.pass_time(5).end("job-w1", exit_code=1).end("job-w2", exit_code=0)
    cluster.settle()
    assert cluster.condition("Failed") == ("True", "CopyFailed")
    assert "job-w1: exit code 1" in cluster.message("Failed")


def test_copies_of_a_script_keep_to_the_deadline_of_the_job() -> None:
    cluster = plain_job(activeDeadlineSeconds=100)
    cluster.end("job-w0", exit_code=0)
    cluster.pass_time(101).settle()
    assert cluster.condition("Failed") == ("True", "DeadlineExceeded")


def test_other_workers_get_some_time_after_the_first_has_finished() -> None:
    cluster = a_running_job()
    cluster.end("job-w0", Ending.FINISHED)
    cluster.settle()
    assert cluster.status["state"] == "Running"
    assert cluster.status["disruptions"] == 0
    cluster.pass_time(31)
    cluster.settle()
    assert cluster.status["state"] == "Succeeded"


def test_no_worker_is_created_once_training_is_over() -> None:
    cluster = FakeCluster(spec={"elasticPolicy": {"minReplicas": 2}}).with_nodes("a", "b").start()
    cluster.end("job-w0", Ending.FINISHED)
    cluster.with_nodes("c")
    assert "job-w2" in cluster.pods
    cluster.settle()
    assert "job-w2" not in cluster.pods


@pytest.mark.parametrize(
    ("policy", "left"),
    [("None", ["job-w0", "job-w1", "job-w2"]), ("Running", ["job-w0", "job-w1", "job-w2"]), ("All", [])],
)
def test_clean_pod_policy_for_ended_pods(policy: str, left: list[str]) -> None:
    cluster = a_running_job(cleanPodPolicy=policy)
    for name in cluster.members():
        cluster.end(name, Ending.FINISHED)
    cluster.settle()
    assert sorted(cluster.pods) == left


@pytest.mark.parametrize(("has_sidecar", "left"), [(False, ["job-w0", "job-w1", "job-w2"]), (True, [])])
def test_pods_whose_containers_have_ended_keep_their_logs(has_sidecar: bool, left: list[str]) -> None:
    """The kubelet changes the phase of a pod a moment after the last container's status."""
    cluster = a_running_job(cleanPodPolicy="Running")
    for name in cluster.members():
        cluster.end(name, Ending.FINISHED)
        cluster.pods[name]["status"]["phase"] = "Running"
        if has_sidecar:
            cluster.pods[name]["spec"]["containers"].append({"name": "sidecar"})
    cluster.settle()
    assert cluster.status["state"] == "Succeeded"
    assert sorted(name for name, pod in cluster.pods.items() if "deletionTimestamp" not in pod["metadata"]) == left


@pytest.mark.parametrize(("policy", "deleting"), [("None", False), ("Running", True), ("All", True)])
def test_clean_pod_policy_for_pods_that_still_run(policy: str, deleting: bool) -> None:
    cluster = a_running_job(cleanPodPolicy=policy, backoffLimit=0)
    cluster.end("job-w0", Ending.FAILED, exit_code=1)
    cluster.settle()
    assert ("deletionTimestamp" in cluster.pods["job-w1"]["metadata"]) is deleting


def test_time_to_live_deletes_the_job_after_its_end_is_in_the_status() -> None:
    cluster = a_running_job(ttlSecondsAfterFinished=60)
    for name in cluster.members():
        cluster.end(name, Ending.FINISHED)
    cluster.settle()
    assert not cluster.deleted_job
    cluster.pass_time(61)
    cluster.step()
    assert cluster.deleted_job


def test_a_time_to_live_of_zero_still_reports_the_end_first() -> None:
    cluster = a_running_job(ttlSecondsAfterFinished=0)
    for name in cluster.members():
        cluster.end(name, Ending.FINISHED)
    cluster.step()
    assert not cluster.deleted_job
    assert cluster.status["completionTime"]
    cluster.step()
    assert cluster.deleted_job


def test_suspend_removes_all_workers_and_resume_continues_above_the_old_plan() -> None:
    cluster = a_running_job()
    version = cluster.version()
    cluster.edit(lambda spec: spec.update(suspend=True))
    cluster.settle()
    assert all("deletionTimestamp" in body["metadata"] for body in cluster.pods.values())
    assert cluster.condition("Ready") == ("False", "Suspended")
    for name in list(cluster.pods):
        cluster.end(name, Ending.LEFT)
        cluster.vanish(name)
    cluster.settle()
    assert cluster.status["state"] == "Suspended"
    assert cluster.condition("Ready") == ("True", "Suspended")
    assert "startTime" not in cluster.status
    cluster.edit(lambda spec: spec.update(suspend=False)).pass_time(100)
    cluster.start()
    assert cluster.version()[0] == version[0] + 1
    assert cluster.status["state"] == "Running"
    assert cluster.status["disruptions"] == 0
    assert cluster.status["restarts"] == 0
    assert cluster.events.count("Resumed") == 1


def test_the_deadline_counts_from_the_start() -> None:
    cluster = a_running_job(activeDeadlineSeconds=100)
    cluster.pass_time(101)
    cluster.settle()
    assert cluster.condition("Failed") == ("True", "DeadlineExceeded")


def test_the_pre_running_deadline_fails_only_a_job_that_has_not_begun() -> None:
    waiting = FakeCluster(spec={"preRunningDeadlineSeconds": 50})
    waiting.settle()
    waiting.pass_time(51)
    waiting.settle()
    assert waiting.condition("Failed") == ("True", "PreRunningDeadlineExceeded")
    running = a_running_job(preRunningDeadlineSeconds=50)
    running.pass_time(51)
    running.settle()
    assert running.status["state"] == "Running"
