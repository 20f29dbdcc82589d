"""Pods on lost nodes: deletions are forced only where that is allowed, and only after the grace period and a wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.job import decide
from support.fake_cluster import NOW_S, FakeCluster, a_running_job

AFTER_S = 60.0
GRACE_S = 30.0


def stuck(*, node: str = "Unknown", deleted: bool = True) -> FakeCluster:
    """Return a job that trains, where one worker's node is out of reach and its pod is to be deleted since now."""
    cluster = a_running_job()
    body = cluster.pods["job-w0"]
    cluster.nodes[body["spec"]["nodeName"]]["status"]["conditions"] = [{"type": "Ready", "status": node}]
    if deleted:
        body["metadata"]["deletionTimestamp"] = rfc3339(NOW_S + GRACE_S)
    return cluster


def decided(cluster: FakeCluster, after_s: float, *, allowed: bool = True) -> Decision:
    """Return the decision so many seconds after now."""
    inputs = replace(cluster.observe(), now_s=NOW_S + after_s, force_delete_s=AFTER_S if allowed else None)
    return decide(inputs)


def test_a_deletion_is_forced_after_the_grace_period_and_the_wait() -> None:
    waits = decided(stuck(), 1.0)
    assert waits.force == ()
    assert waits.again_s is not None
    assert waits.again_s <= GRACE_S + AFTER_S - 1.0
    assert decided(stuck(), GRACE_S + AFTER_S - 1.0).force == ()
    assert [pod.name for pod in decided(stuck(), GRACE_S + AFTER_S).force] == ["job-w0"]


def test_without_permission_no_deletion_is_forced() -> None:
    assert decided(stuck(), 1e6, allowed=False).force == ()


@pytest.mark.parametrize("cluster", [stuck(node="True"), stuck(node="False"), stuck(deleted=False)])
def test_a_kubelet_that_answers_ends_its_pods_itself_and_so_does_a_pod_that_nobody_deleted(
    cluster: FakeCluster,
) -> None:
    assert decided(cluster, 1e6).force == ()


def test_pods_of_a_suspended_job_are_deleted_too() -> None:
    cluster = stuck()
    cluster.job["spec"]["suspend"] = True
    assert [pod.name for pod in decided(cluster, GRACE_S + AFTER_S).force] == ["job-w0"]


def test_a_pod_whose_node_object_is_gone_is_deleted_too() -> None:
    cluster = stuck()
    del cluster.nodes[cluster.pods["job-w0"]["spec"]["nodeName"]]
    assert [pod.name for pod in decided(cluster, GRACE_S + AFTER_S).force] == ["job-w0"]
