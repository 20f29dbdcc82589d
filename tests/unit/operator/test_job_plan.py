"""The plan that somebody deletes, damages or puts back is made again, higher."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import keys
from operator_world import World, a_running_job

SPOT_NOTICE = "aws-node-termination-handler/spot-itn:NoSchedule"


def test_a_deleted_plan_is_made_again_higher_with_the_same_members() -> None:
    world = a_running_job()
    version, members = world.version(), world.members()
    world.plan = None
    world.settle()
    assert world.version() > version
    assert world.members() == members


@pytest.mark.parametrize("text", ["", "{", '{"schema": 99}', "[]"])
def test_a_damaged_plan_is_made_again_higher(text: str) -> None:
    world = a_running_job()
    version = world.version()
    assert world.plan is not None
    world.plan["data"][keys.PLAN_KEY] = text
    world.settle()
    assert world.version() > version


def test_an_older_plan_put_back_by_somebody_is_replaced_above_the_newest() -> None:
    world = World().with_nodes("a", "b").start()
    assert world.plan is not None
    old = world.plan["data"][keys.PLAN_KEY]
    world.with_nodes("c").schedule().run()
    world.settle()
    newest = world.version()
    world.plan["data"][keys.PLAN_KEY] = old
    world.settle()
    assert world.version() > newest


def test_an_older_plan_that_only_differs_in_its_version_is_replaced_too() -> None:
    """Workers that hold the newer version refuse it, newcomers would not: they have to hear of one version."""
    world = a_running_job()
    assert world.plan is not None
    old = world.plan["data"][keys.PLAN_KEY]
    world.taint("c", SPOT_NOTICE)
    world.settle()
    world.nodes["c"]["spec"]["taints"].clear()
    world.settle()
    newest = world.version()
    world.plan["data"][keys.PLAN_KEY] = old
    world.settle()
    assert world.version() > newest


def test_a_plan_lost_while_nobody_is_ready_waits_below_the_one_that_members_hold() -> None:
    """Generation 0 ranks below what running members hold, so they go on; newcomers learn that they have to wait."""
    world = a_running_job()
    revision = world.version()[1]
    for name in world.members():
        world.set_ready(name, ready=False)
    world.plan = None
    world.settle()
    assert world.version() == (0, revision + 1)
    world.edit(lambda spec: spec.update(elasticPolicy={"minReplicas": 2}))
    world.settle()
    assert world.version() == (0, revision + 2), "a change of the spec does not lift it above them"
    for name in ("job-w0", "job-w1", "job-w2"):
        world.set_ready(name)
    world.settle()
    assert world.version()[0] == 2
