"""To whom a new plan is delivered at once: everyone, or a few members that pass it on."""

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


def test_a_new_generation_goes_to_every_member() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=WORKERS), spec={"training": {"globalBatchSize": 60}})
    cluster.with_nodes("a", "a2", cpu="8").settle()
    cluster.schedule().run()
    decision = cluster.step()
    assert len(decision.touch) == WORKERS


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


def test_a_member_s_announced_end_is_told_to_everyone() -> None:
    cluster = a_job_of_six()
    cluster.pods[cluster.members()[0]]["metadata"]["deletionTimestamp"] = rfc3339(cluster.now_s)
    leaving = cluster.step()
    assert leaving.plan is not None
    assert json.loads(leaving.plan["data"][keys.PLAN_KEY])["drain"]
    assert len(leaving.touch) == WORKERS
