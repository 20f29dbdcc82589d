"""Causes that only events of a pod name reach the job's status: the real API server selects the events."""

from __future__ import annotations

from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.resources import EVENTS
from support.api_cluster import Cluster, Operator
from support.waiting import until


async def test_a_missing_volume_is_in_the_status_with_the_next_step(
    kube: KubeClient, cluster: Cluster, operator: Operator
) -> None:
    """The pod has a node and no containers; here, the test writes the kubelet's warning."""
    await cluster.add_node("a")
    await cluster.create(cluster.job(cluster.pool("a")))
    (name,) = await cluster.scheduled(1)
    uid = (await cluster.pods())[name]["metadata"]["uid"]
    about = {"kind": "Pod", "namespace": cluster.namespace, "name": name, "uid": uid, "apiVersion": "v1"}
    for number, (kind, words) in enumerate((("Normal", "pulled"), ("Warning", 'configmap "settings" not found'))):
        await kube.create(
            EVENTS,
            {
                "apiVersion": "v1", "kind": "Event",
                "metadata": {"name": f"{name}.{number}", "namespace": cluster.namespace},
                "involvedObject": about, "type": kind, "reason": "FailedMount", "message": words,
                "lastTimestamp": "2027-01-15T08:00:00Z", "source": {"component": "kubelet"},
            },
        )  # fmt: skip

    async def named() -> bool:
        _, _, message = await cluster.condition("Running")
        return 'FailedMount: configmap "settings" not found: create the Secret' in message

    await until(named, "the condition Running names the missing ConfigMap")
