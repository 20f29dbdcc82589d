"""Which jobs a new leader looks at first."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.cluster_state.parse import parse_job, parse_node, parse_pod
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobKey
from support.fake_cluster import FakeCluster, a_running_job, job_body, node_body


def store_of(cluster: FakeCluster) -> Store:
    """Return a store with the objects of a cluster."""
    store = Store()
    store.jobs.put(parse_job(cluster.job))
    for body in cluster.nodes.values():
        store.nodes.put(parse_node(body))
    for body in cluster.pods.values():
        pod = parse_pod(body)
        assert pod is not None
        store.pods.put(pod)
    return store


@pytest.mark.parametrize(
    ("observed", "generation", "expected"),
    [(2, 3, ["job"]), (3, 3, []), (0, 1, []), (None, 1, [])],
    ids=["changed", "answered", "new", "new without status"],
)
def test_a_changed_spec(observed: int | None, generation: int, expected: list[str]) -> None:
    body = job_body(generation=generation)
    if observed is not None:
        body["status"] = {"observedGeneration": observed}
    store = Store()
    store.jobs.put(parse_job(body))
    assert [key.name for key in store.unanswered()] == expected


@pytest.mark.parametrize(
    "change",
    [
        {"taints": ["karpenter.sh/disrupted:NoSchedule"]},
        {"ready": "False"},
        {"ready": "Unknown"},
        None,
    ],
    ids=["announced", "not ready", "silent", "gone"],
)
def test_a_worker_on_an_ending_node(change: dict[str, Any] | None) -> None:
    cluster = a_running_job()
    store = store_of(cluster)
    assert store.unanswered() == []
    if change is None:
        store.nodes.discard("a")
    else:
        body = node_body("a", "a", **change)
        body["metadata"]["resourceVersion"] = "1000"
        store.nodes.put(parse_node(body))
    assert store.unanswered() == [JobKey("ns", "job")]


def test_workers_that_have_ended_need_no_answer() -> None:
    cluster = a_running_job()
    for body in cluster.pods.values():
        body["status"]["phase"] = "Succeeded"
    store = store_of(cluster)
    store.nodes.discard("a")
    assert store.unanswered() == []
