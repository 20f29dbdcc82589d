"""Workers that wait for a node: one, and more where an autoscaler brings nodes."""

from __future__ import annotations

from heterotrain_operator.cluster_state.parse import rfc3339
from support.fake_cluster import FakeCluster, pool


def waiting(cluster: FakeCluster) -> list[str]:
    return [name for name, body in cluster.pods.items() if not body["spec"].get("nodeName")]


def place(cluster: FakeCluster, name: str, node: str) -> None:
    """Let a node come and a waiting worker get it now."""
    cluster.with_nodes(node, cpu="1")
    cluster.pods[name]["spec"]["nodeName"] = node
    cluster.set_ready(name)
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": rfc3339(cluster.now_s)}
    cluster.pods[name]["status"].setdefault("conditions", []).append(placed)


def bring_nodes(cluster: FakeCluster, number: int, *, after_s: float) -> None:
    """Let an autoscaler bring nodes for so many of the waiting workers, after they have waited."""
    cluster.pass_time(after_s)
    for name in waiting(cluster)[:number]:
        place(cluster, name, f"a{len(cluster.nodes) + 1}")
    cluster.settle()


def autoscaled(**fields: int) -> FakeCluster:
    cluster = FakeCluster(pool("a", **{"maxReplicas": 40, **fields}))
    cluster.settle()
    return cluster


def test_nodes_are_requested_in_slow_start() -> None:
    cluster, seen = autoscaled(), []
    for _ in range(5):
        seen.append(len(waiting(cluster)))
        bring_nodes(cluster, seen[-1], after_s=30)
    assert seen == [1, 2, 4, 8, 16]
    assert len(waiting(cluster)) == 9, "the pool's maximum"


def test_a_node_that_a_younger_worker_took_counts_as_well() -> None:
    """The scheduler may still hold back the worker that asked for the node."""
    cluster = autoscaled()
    bring_nodes(cluster, 1, after_s=30)
    cluster.schedule()
    asked = waiting(cluster)
    assert len(asked) == 2
    bring_nodes(cluster, 1, after_s=30)
    cluster.schedule()
    young = next(name for name in waiting(cluster) if name not in asked)
    place(cluster, young, "late")
    cluster.settle()
    assert len(waiting(cluster)) == 4


def test_where_no_more_nodes_come_one_worker_waits_again() -> None:
    cluster = autoscaled()
    for _ in range(3):
        bring_nodes(cluster, 100, after_s=30)
    assert len(waiting(cluster)) == 8
    cluster.schedule()  # no room
    cluster.pass_time(700)
    cluster.settle()
    assert len(waiting(cluster)) == 1


def test_workers_that_find_room_at_once_say_nothing_of_an_autoscaler() -> None:
    cluster = autoscaled()
    bring_nodes(cluster, 1, after_s=1)
    assert len(waiting(cluster)) == 1
