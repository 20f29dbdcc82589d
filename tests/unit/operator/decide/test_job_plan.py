"""A plan that is deleted, damaged or replaced by an older one is written again with a higher version."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import keys
from support.fake_cluster import FakeCluster, a_running_job

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
