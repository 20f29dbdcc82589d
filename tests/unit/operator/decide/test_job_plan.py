"""A plan that is deleted, damaged or old is written again with a higher version; a request for a checkpoint, too."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.consistency import MAX_REQUEST_CHARS
from support.fake_cluster import JOB_UID, FakeCluster, a_running_job

SPOT_TAINT = "aws-node-termination-handler/spot-itn:NoSchedule"


def test_a_deleted_plan_is_written_again_higher_with_the_same_members() -> None:
    cluster = a_running_job()
    version, members = cluster.version(), cluster.members()
    cluster.plan = None
    cluster.settle()
    assert cluster.version() > version
    assert cluster.members() == members


@pytest.mark.parametrize("text", ["", "{", '{"schema": 99}', "[]"])
def test_a_damaged_plan_is_written_again_higher(text: str) -> None:
    cluster = a_running_job()
    version = cluster.version()
    assert cluster.plan is not None
    cluster.plan["data"][keys.PLAN_KEY] = text
    cluster.settle()
    assert cluster.version() > version


@pytest.mark.parametrize("field", ["owner", "text"])
def test_a_plan_of_another_job_is_written_again_higher(field: str) -> None:
    """Such as one that a user has copied, or that a job of the same name has left."""
    cluster = a_running_job()
    version = cluster.version()
    assert cluster.plan is not None
    if field == "owner":
        cluster.plan["metadata"]["ownerReferences"][0]["uid"] = "another"
    else:
        text = cluster.plan["data"][keys.PLAN_KEY]
        cluster.plan["data"][keys.PLAN_KEY] = text.replace(JOB_UID, "another")
    cluster.settle()
    assert cluster.version() > version


def test_an_older_plan_is_replaced_above_the_newest() -> None:
    cluster = FakeCluster().with_nodes("a", "b").start()
    assert cluster.plan is not None
    old = cluster.plan["data"][keys.PLAN_KEY]
    cluster.with_nodes("c").schedule().run()
    cluster.settle()
    newest = cluster.version()
    cluster.plan["data"][keys.PLAN_KEY] = old
    cluster.settle()
    assert cluster.version() > newest


def test_an_older_plan_that_only_differs_in_its_version_is_replaced_too() -> None:
    """Workers with the newer version refuse it, but new workers would not: all must see one version."""
    cluster = a_running_job()
    assert cluster.plan is not None
    old = cluster.plan["data"][keys.PLAN_KEY]
    cluster.taint("c", SPOT_TAINT)
    cluster.settle()
    cluster.nodes["c"]["spec"]["taints"].clear()
    cluster.settle()
    newest = cluster.version()
    cluster.plan["data"][keys.PLAN_KEY] = old
    cluster.settle()
    assert cluster.version() > newest


def test_a_plan_lost_while_no_worker_is_ready_stays_below_the_members_plan() -> None:
    """Generation 0 ranks below what running members hold, so they go on; newcomers learn that they have to wait."""
    cluster = a_running_job()
    revision = cluster.version()[1]
    for name in cluster.members():
        cluster.set_ready(name, ready=False)
    cluster.plan = None
    cluster.settle()
    assert cluster.version() == (0, revision + 1)
    cluster.edit(lambda spec: spec.update(elasticPolicy={"minReplicas": 2}))
    cluster.settle()
    assert cluster.version() == (0, revision + 2), "a change of the spec does not lift it above them"
    for name in ("job-w0", "job-w1", "job-w2"):
        cluster.set_ready(name)
    cluster.settle()
    assert cluster.version()[0] == 2


def asked(cluster: FakeCluster, value: str | None) -> str:
    """Set the annotation of a request, let the operator answer, and return what the plan says."""
    cluster.job["metadata"]["annotations"] = {} if value is None else {keys.ANNOTATION_CHECKPOINT: value}
    cluster.settle()
    return str(cluster.plan_json["checkpoint_request"])


def test_each_request_for_a_checkpoint_is_a_revision_for_the_same_members() -> None:
    """The annotation's text does not matter, only that it is another one; without it the plan asks for nothing."""
    cluster = a_running_job(checkpoint={"uri": "file:///store"})
    members, (generation, revision) = cluster.members(), cluster.version()
    found = [asked(cluster, value) for value in ("2026-11-23", "x" * 100_000, "2026-11-23", None)]
    assert found[0] == found[2] != found[1]
    assert found[3] == ""
    assert max(map(len, found)) <= MAX_REQUEST_CHARS
    assert cluster.version() == (generation, revision + 4)
    assert cluster.members() == members


def test_a_job_without_a_store_is_not_asked_for_checkpoints() -> None:
    cluster = a_running_job()
    version = cluster.version()
    assert asked(cluster, "now") == ""
    assert cluster.version() == version


def test_a_request_survives_a_change_of_members_and_a_lost_plan() -> None:
    cluster = a_running_job(checkpoint={"uri": "file:///store"})
    request = asked(cluster, "now")
    cluster.vanish("job-w1")
    cluster.settle()
    assert cluster.plan_json["checkpoint_request"] == request
    cluster.plan = None
    cluster.settle()
    assert cluster.plan_json["checkpoint_request"] == request
