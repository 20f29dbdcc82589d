"""A job goes on after its end, in another store, or in the place of an earlier one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from heterotrain_core.contract import env, keys
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.cluster_state.telemetry import MemberGauges, Telemetry
from heterotrain_operator.decide.lifecycle import LifeStage
from support.fake_cluster import Body, FakeCluster, a_running_job

CHECKPOINT = {"uri": "s3://bucket/digits"}


def settings(cluster: FakeCluster) -> Body:
    """Return the training settings of the newest pod."""
    pod = max(cluster.pods.values(), key=lambda body: int(body["metadata"]["resourceVersion"]))
    variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    found: Body = json.loads(str(variables[env.CONFIG]))
    return found


def failed(**spec: Any) -> FakeCluster:
    """Return a job that trained up to a checkpoint of step 120 and then failed."""
    cluster = a_running_job(backoffLimit=0, **{"checkpoint": dict(CHECKPOINT), **spec})
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="boom", saved=(120, cluster.now_s))
    cluster.settle()
    assert cluster.status["state"] == LifeStage.FAILED.value
    return cluster


def ask(cluster: FakeCluster, value: str = "now") -> None:
    cluster.job["metadata"].setdefault("annotations", {})[keys.ANNOTATION_RETRY] = value


def live(cluster: FakeCluster) -> None:
    for _ in range(6):
        cluster.step()
        for name in [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]:
            cluster.vanish(name)
        cluster.schedule().run()
        cluster.pass_time(6.0)


def test_a_failed_job_names_the_command_and_the_folder() -> None:
    folder = "s3://bucket/digits/ns-job-job-uid"
    message = failed().message("Failed")
    assert message.endswith(f"; `heterotrain retry job` continues it from step 120 in {folder}")
    assert "boom" in message
    assert failed(checkpoint=None).message("Failed").endswith("; `heterotrain retry job` starts it again")


def test_a_failed_job_is_tried_again_on_request_as_the_same_job() -> None:
    cluster = failed()
    uid, generation = cluster.job["metadata"]["uid"], cluster.version()[0]
    live(cluster)
    assert cluster.status["state"] == LifeStage.FAILED.value, "nothing happens without a request"
    cluster.edit(lambda spec: spec["template"]["spec"]["containers"][0].update(image="corrected"))
    ask(cluster)
    live(cluster)
    assert cluster.status["state"] == "Running"
    assert cluster.condition("Failed") == ("False", "NotEnded")
    assert cluster.status["restarts"] == 0
    assert "completionTime" not in cluster.status
    assert cluster.job["metadata"]["uid"] == uid
    assert cluster.version()[0] > generation
    assert {body["spec"]["containers"][0]["image"] for body in cluster.pods.values()} == {"corrected"}
    assert cluster.status["lastCheckpoint"]["step"] == 120


def test_a_second_failure_is_final_again_until_another_request() -> None:
    cluster = failed()
    ask(cluster)
    live(cluster)
    name = next(iter(cluster.pods))
    cluster.end(name, Ending.FAILED, exit_code=1, reason="boom again").settle()
    live(cluster)
    assert cluster.status["state"] == LifeStage.FAILED.value
    assert "boom again" in cluster.message("Failed")
    ask(cluster, "again")
    live(cluster)
    assert cluster.status["state"] == "Running"


def test_a_job_that_failed_by_a_deadline_gets_the_whole_time_again() -> None:
    cluster = a_running_job(activeDeadlineSeconds=60)
    cluster.pass_time(61.0).settle()
    assert cluster.condition("Failed") == ("True", "DeadlineExceeded")
    ask(cluster)
    live(cluster)
    assert cluster.status["state"] == "Running"
    cluster.pass_time(61.0).settle()
    assert cluster.status["state"] == LifeStage.FAILED.value


def test_a_job_that_succeeded_is_not_tried_again() -> None:
    cluster = a_running_job().end("job-w0", Ending.FINISHED, reason="done")
    cluster.pass_time(40.0)
    cluster.settle()
    ask(cluster)
    live(cluster)
    assert cluster.status["state"] == LifeStage.SUCCEEDED.value


@pytest.mark.parametrize("source", ["digits", "s3://bucket/other/ns-old-uid"])
def test_workers_are_told_where_to_continue_and_the_status_says_where_they_did(source: str) -> None:
    cluster = a_running_job(checkpoint={**CHECKPOINT, "resumeFrom": source})
    assert settings(cluster)["checkpoint_resume_from"] == source
    gauges = {("w", 0): MemberGauges(worker="job-w0", step=121, resumed_step=120)}
    cluster.telemetry = Telemetry(gauges=gauges)  # type: ignore[arg-type]  # the key is of no interest
    cluster.settle()
    assert cluster.status["continuedFrom"] == {"source": source, "step": 120}
    assert "Continued" in cluster.events
    cluster.telemetry = Telemetry()
    cluster.settle()
    assert cluster.status["continuedFrom"] == {"source": source, "step": 120}


def test_another_store_continues_from_the_folder_in_the_one_before() -> None:
    cluster = a_running_job(checkpoint=dict(CHECKPOINT))
    assert "checkpoint_resume_from" not in settings(cluster)
    for name in list(cluster.pods):
        cluster.end(name, Ending.LEFT, saved=(50, cluster.now_s), told=True)
    cluster.settle()
    assert cluster.status["lastCheckpoint"]["step"] == 50
    cluster.edit(lambda spec: spec.update(suspend=True)).settle()
    live(cluster)
    cluster.edit(lambda spec: spec.update(suspend=False, checkpoint={"uri": "s3://other"}))
    live(cluster)
    told = settings(cluster)
    assert told["checkpoint_uri"] == "s3://other"
    assert told["checkpoint_resume_from"] == "s3://bucket/digits/ns-job-job-uid"
    assert cluster.condition("TemplateApplied") == ("True", "Applied"), "and it stays so"


def test_another_store_before_the_first_checkpoint_begins() -> None:
    cluster = a_running_job(checkpoint=dict(CHECKPOINT))
    cluster.edit(lambda spec: spec.update(suspend=True)).settle()
    live(cluster)
    cluster.edit(lambda spec: spec.update(suspend=False, checkpoint={"uri": "s3://other"}))
    live(cluster)
    assert "checkpoint_resume_from" not in settings(cluster)
