"""A job whose workers never start costs other jobs one worker for less than a minute, however long nobody looks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from heterotrain_operator.decide.allocation.allocate import CANNOT_START_AFTER_S, RETRY_S
from support.fake_cluster import Body, FakeCluster, pool
from support.multi_job_cluster import MultiJobCluster

PULL: Body = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "trainer:typo"'}
CONFIG: Body = {"reason": "CreateContainerConfigError", "message": 'secret "creds" not found'}


def waits(waiting: Body) -> Callable[..., FakeCluster]:
    """Return what a kubelet does instead of running a job's containers."""

    def run(cluster: FakeCluster) -> FakeCluster:
        for body in cluster.pods.values():
            if body["spec"].get("nodeName") and body["status"]["phase"] == "Pending":
                body["status"]["containerStatuses"] = [{"name": "main", "state": {"waiting": waiting}}]
        return cluster

    return run


def two_tenants(waiting: Body, **spec: object) -> tuple[MultiJobCluster, FakeCluster]:
    """Return a job that trains with four workers on all nodes, and a new one whose containers wait like this."""
    multi = MultiJobCluster().with_nodes("a", "a2", cpu="2")
    multi.add("trains", pool("a", maxReplicas=4))
    multi.settle()
    new = multi.add("new", pool("a", maxReplicas=4), **spec)
    new.run = lambda *_, **__: waits(waiting)(new)  # type: ignore[method-assign]  # plays the kubelet
    return multi, new


def repair(new: FakeCluster) -> None:
    """Let the kubelet run the containers from now on."""
    del new.run  # type: ignore[attr-defined]  # what a test has put in front of the method
    new.run()


@pytest.mark.parametrize("waiting", [PULL, CONFIG])
def test_another_job_loses_one_worker_for_less_than_a_minute(waiting: Body) -> None:
    multi, new = two_tenants(waiting)
    lost_s, least = 0.0, 4
    for _ in range(50):
        multi.step()
        multi.now_s += 3.0
        least = min(least, multi.placed()["trains"]["a"])
        lost_s += 3.0 * (multi.placed()["trains"]["a"] < 4)
    assert (least, multi.placed()["new"]) == (3, {})
    assert lost_s < 60
    assert f"{waiting['reason']}: {waiting['message']}" in new.message("Scheduled")
    assert "tried again later" in new.message("Scheduled")


def test_a_ready_probe_brings_the_other_workers() -> None:
    multi, new = two_tenants({"reason": "ContainerCreating"})
    for _ in range(20):  # an image that is pulled for minutes is not a failure
        multi.step()
        multi.now_s += 15.0
    assert multi.placed() == {"trains": {"a": 3}, "new": {"a": 1}}
    repair(new)
    multi.settle()
    assert multi.placed() == {"trains": {"a": 2}, "new": {"a": 2}}


def test_a_corrected_spec_is_tried_at_once() -> None:
    multi, new = two_tenants(PULL)
    multi.settle()
    multi.now_s += CANNOT_START_AFTER_S
    multi.settle()
    multi.keeps_grants = False
    multi.settle()
    assert multi.placed() == {"trains": {"a": 4}, "new": {}}, "a new operator reads it from the status"
    assert PULL["message"] in new.message("Scheduled")
    multi.keeps_grants = True
    repair(new)
    multi.settle()
    assert multi.placed() == {"trains": {"a": 4}, "new": {}}, "nothing shows that the cause is gone"
    new.edit(lambda spec: spec["template"]["spec"]["containers"][0].update(image="trainer:right"))
    multi.settle()
    assert multi.placed() == {"trains": {"a": 2}, "new": {"a": 2}}


def test_it_is_tried_again_by_itself_and_each_time_later() -> None:
    multi, new = two_tenants(PULL)
    tries = []
    for _ in range(int(8 * RETRY_S / 60)):
        before = multi.placed()["new"]
        multi.step()
        multi.now_s += 60.0
        if multi.placed()["new"] and not before:
            tries.append(multi.now_s)
    assert [round((later - tried) / RETRY_S) for tried, later in pairwise(tries)] == [1, 2, 4]
    repair(new)
    multi.now_s += 4 * RETRY_S
    multi.settle()
    assert multi.placed() == {"trains": {"a": 2}, "new": {"a": 2}}


def test_one_worker_stays_as_a_probe_where_nobody_needs_its_node() -> None:
    """It shows when the cause is gone, and the others do not hold nodes that an autoscaler could give back."""
    multi = MultiJobCluster().with_nodes("a", "a2", cpu="2")
    new = multi.add("new", pool("a", maxReplicas=4))
    new.run = lambda *_, **__: waits(PULL)(new)  # type: ignore[method-assign]  # a kubelet that pulls no image
    multi.settle()
    multi.now_s += 600
    multi.settle()
    assert multi.placed() == {"new": {"a": 1}}
    assert "ImagePullBackOff" in new.message("Running")
    repair(new)
    multi.settle()
    assert multi.placed() == {"new": {"a": 4}}


def test_an_all_or_nothing_group_gets_its_nodes_at_once() -> None:
    """None of its pods gets a node before all of them can, so that no probe would ever be ready."""
    multi, _ = two_tenants(
        {"reason": "ContainerCreating"}, elasticPolicy={"minReplicas": 2}, podGroup={"scheduler": "Coscheduling"}
    )
    multi.step()
    assert multi.placed() == {"trains": {"a": 2}, "new": {"a": 2}}
