"""A job on a node that flaps: few changes of members, no churn of pods, and the status names node and time."""

from __future__ import annotations

from dataclasses import replace

from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.cluster_state.flapping import FIRST_HOLD_S, FLAPS, Hold
from heterotrain_operator.cluster_state.parse import AVOIDS_ANNOTATION
from heterotrain_operator.decide.workers.node_state import NodeState, assess_node
from heterotrain_operator.decide.workers.state import WorkerState, assess_worker
from support.fake_cluster import FakeCluster, pool


def training(**spec: object) -> FakeCluster:
    """Return a job of three workers on three of four nodes of one pool; ``a1`` will flap."""
    cluster = FakeCluster(pool("a", maxReplicas=3), spec=dict(spec)).with_nodes("a1", "a2", "a3", "a4", cpu="1")
    cluster.settle()
    cluster.schedule().run()
    for _ in range(3):
        cluster.settle()
        cluster.schedule().run()
    return cluster


def on(cluster: FakeCluster, node: str) -> list[str]:
    return [view.name for view in cluster.pod_views if view.node == node and not view.phase_ended]


def flap(cluster: FakeCluster, times: int) -> None:
    for _ in range(times):
        for ready in ("Unknown", "True"):
            cluster.set_node("a1", ready).pass_time(5)
            advance(cluster)


def advance(cluster: FakeCluster) -> None:
    """Let operator, scheduler and kubelets act in turn; pods that are being deleted go."""
    for _ in range(4):
        cluster.step()
        for name in [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]:
            cluster.vanish(name)
        cluster.schedule().run()


def test_a_flapping_node_is_left_alone_for_a_while() -> None:
    """Without a hold, each flap costs two generations."""
    cluster = training()
    flap(cluster, FLAPS)
    calm = cluster.version()
    assert len(cluster.members()) == 3
    assert not set(on(cluster, "a1")) & set(cluster.members())
    flap(cluster, 4)
    assert cluster.version()[0] == calm[0], "further flaps concern nobody"
    assert len(cluster.members()) == 3
    assert cluster.status["restarts"] == 0


def test_the_hold_is_named_and_pods_avoid_the_node() -> None:
    cluster = training()
    cluster.edit(lambda spec: spec["workerPools"][0].update(maxReplicas=4)).settle()
    flap(cluster, FLAPS)
    cluster.step()
    assert "node a1 was lost 3 times and is not used until 2027" in cluster.status["reason"]
    waiting = [body for name, body in cluster.pods.items() if not body["spec"].get("nodeName")]
    assert waiting, "a worker waits for another node"
    for body in waiting:
        assert body["metadata"]["annotations"][AVOIDS_ANNOTATION] == "a1"
        assert "a1" not in (body["spec"].get("nodeName") or "")


def not_ready(cluster: FakeCluster, node: str) -> None:
    """A node reports that it is not ready, and Kubernetes taints it."""
    cluster.set_node(node, "False").taint(node, "node.kubernetes.io/not-ready:NoSchedule").pass_time(5)


def test_pods_avoid_a_held_node_that_is_not_ready_now() -> None:
    """Such a pod may be scheduled at the moment in which the node becomes ready."""
    cluster = training()
    cluster.edit(lambda spec: spec["workerPools"][0].update(maxReplicas=4)).settle()
    flap(cluster, FLAPS)
    not_ready(cluster, "a1")
    cluster.settle()
    waiting = [body for body in cluster.pods.values() if not body["spec"].get("nodeName")]
    assert [body["metadata"]["annotations"][AVOIDS_ANNOTATION] for body in waiting] == ["a1"]


def test_a_worker_that_got_a_held_node_and_is_no_member_is_removed() -> None:
    cluster = training()
    cluster.edit(lambda spec: spec["workerPools"][0].update(maxReplicas=4)).settle()
    flap(cluster, FLAPS)
    cluster.settle()
    (name,) = [name for name, body in cluster.pods.items() if not body["spec"].get("nodeName")]
    cluster.pods[name]["spec"]["nodeName"] = "a1"  # the scheduler was faster than the change
    cluster.set_ready(name)
    before = cluster.version()
    advance(cluster)
    assert not on(cluster, "a1")
    assert cluster.version()[0] == before[0]


def test_after_the_hold_the_node_is_used_again() -> None:
    cluster = training()
    cluster.edit(lambda spec: spec["workerPools"][0].update(maxReplicas=4)).settle()
    flap(cluster, FLAPS)
    for name in on(cluster, "a1"):
        cluster.end(name, Ending.LEFT)
    cluster.settle()
    cluster.schedule().run()
    assert on(cluster, "a1") == []
    cluster.pass_time(FIRST_HOLD_S)
    for _ in range(3):
        cluster.settle()
        cluster.schedule().run()
    assert len(on(cluster, "a1")) == 1
    assert not any(AVOIDS_ANNOTATION in body["metadata"]["annotations"] for body in cluster.pods.values() if
                   body["spec"].get("nodeName") == "a1")  # fmt: skip


def test_a_failure_on_a_held_node_is_still_the_job_s_own() -> None:
    """The hold asks workers to leave; it is no excuse for an exception."""
    cluster = training()
    (name,) = on(cluster, "a1")
    cluster.end(name, Ending.FAILED, exit_code=1, reason="boom")
    (pod,) = (view for view in cluster.pod_views if view.name == name)
    held = replace(cluster.node_views["a1"], hold=Hold(FLAPS, cluster.now_s + 60))
    assert assess_node(held, "a1").state is NodeState.LEAVING
    assert assess_worker(pod, {"a1": held}).state is WorkerState.FAILED


def test_own_affinities_of_a_template_stay() -> None:
    """The exclusion is added to each term; a template's own exclusions cause no endless changes."""
    own = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["a4"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [own, {}]}}}
    template = {
        "metadata": {"annotations": {AVOIDS_ANNOTATION: "copied"}},
        "spec": {"containers": [{"name": "main", "image": "image"}], "affinity": affinity},
    }
    cluster = FakeCluster(pool("a", maxReplicas=4), template=template).with_nodes("a1", "a2", "a3", cpu="1")
    cluster.settle()
    assert not any(AVOIDS_ANNOTATION in body["metadata"]["annotations"] for body in cluster.pods.values())
    cluster.schedule().run().settle()
    flap(cluster, FLAPS)
    cluster.step()
    terms = [
        body["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        for body in cluster.pods.values()
        if AVOIDS_ANNOTATION in body["metadata"]["annotations"]
    ]
    assert terms
    for first, second in terms:
        assert [field["values"] for field in first["matchFields"]] == [["a4"], ["a1"]]
        assert [field["values"] for field in second["matchFields"]] == [["a1"]]
