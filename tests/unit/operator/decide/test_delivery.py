"""To whom a new plan is delivered at once: a few members that pass it on, and those whom nobody tells."""

from __future__ import annotations

import json
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.decide.plan_delivery import MESSENGERS
from support.fake_cluster import FakeCluster, pool

WORKERS = 6


def a_job_of_six() -> FakeCluster:
    cluster = FakeCluster(pool("a", maxReplicas=WORKERS), spec={"training": {"globalBatchSize": 60}})
    return cluster.with_nodes("a", "a2", cpu="8").start()


def revised(cluster: FakeCluster, **changes: Any) -> list[str]:
    """Let the cluster hold a newer revision, and return the pods that the next pass touches."""
    assert cluster.plan is not None
    plan = json.loads(cluster.plan["data"][keys.PLAN_KEY])
    plan["revision"] += 1
    cluster.plan["data"][keys.PLAN_KEY] = json.dumps({**plan, **changes})
    return [each.name for each in cluster.step().touch]


def on(cluster: FakeCluster, name: str) -> str:
    """Return the node of a pod."""
    node: str = cluster.pods[name]["spec"]["nodeName"]
    return node


def test_the_first_members_are_told_by_two_of_them_on_two_nodes() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=WORKERS), spec={"training": {"globalBatchSize": 60}})
    cluster.with_nodes("a", "a2", cpu="3").settle()
    cluster.schedule().run()
    touched = [each.name for each in cluster.step().touch]
    assert len(touched) == MESSENGERS
    assert len({on(cluster, name) for name in touched}) == MESSENGERS


def test_every_launcher_of_a_script_for_torchrun_is_told() -> None:
    """Launchers have no connections with each other by which they could pass a plan on."""
    spec = {"runtime": "Torchrun", "training": {"globalBatchSize": None}}
    cluster = FakeCluster(pool("a", maxReplicas=WORKERS), spec=spec).with_nodes("a", "a2", cpu="3")
    cluster.settle()
    cluster.schedule().run()
    assert len(cluster.step().touch) == WORKERS
    assert len(revised(cluster)) == WORKERS


def test_on_one_node_two_members_are_told_as_well() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=WORKERS), spec={"training": {"globalBatchSize": 60}})
    cluster.with_nodes("a", cpu="8").settle()
    cluster.schedule().run()
    assert len(cluster.step().touch) == MESSENGERS


def test_workers_without_a_plan_with_members_are_told_each() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=3), spec={"elasticPolicy": {"minReplicas": 3}})
    cluster.with_nodes("a", cpu="8").settle()
    cluster.schedule().run(ready=False)
    assert len(revised(cluster)) == 3


def test_a_revision_goes_to_a_few_members_that_pass_it_on() -> None:
    cluster = a_job_of_six()
    assert len(revised(cluster)) == MESSENGERS
    assert cluster.step().touch == ()
    assert len(revised(cluster)) == MESSENGERS, "the next one, too"


def test_another_member_is_told_when_one_of_the_few_is_gone() -> None:
    cluster = a_job_of_six()
    first, *_ = revised(cluster)
    cluster.set_ready(first, ready=False)
    (other,) = [each.name for each in cluster.step().touch]
    assert other != first


def test_a_member_s_announced_end_is_told_to_it_and_to_two_others() -> None:
    cluster = a_job_of_six()
    leaving = cluster.members()[0]
    cluster.pods[leaving]["metadata"]["deletionTimestamp"] = rfc3339(cluster.now_s)
    decision = cluster.step()
    assert decision.plan is not None
    assert json.loads(decision.plan["data"][keys.PLAN_KEY])["drain"]
    touched = [each.name for each in decision.touch]
    assert leaving in touched
    assert len(touched) == 1 + MESSENGERS
