"""What the API server's own admission does to workers: defaults and bounds of a LimitRange, and a ResourceQuota."""

from __future__ import annotations

from typing import Any

from heterotrain_operator.kube.resources import Resource
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import Cluster, Operator
from support.waiting import until

LIMITS = Resource("v1", "limitranges")
QUOTAS = Resource("v1", "resourcequotas")


async def limit_containers(cluster: Cluster, **limits: Any) -> None:
    """Create a LimitRange for containers."""
    await cluster.kube.create(
        LIMITS,
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "limits", "namespace": cluster.namespace},
            "spec": {"limits": [{"type": "Container", **limits}]},
        },
    )


async def set_quota(cluster: Cluster, **hard: str) -> None:
    """Create a ResourceQuota, and wait until the API server goes by it."""
    metadata: Body = {"name": "quota", "namespace": cluster.namespace}
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}
    await cluster.kube.create(QUOTAS, body)

    async def in_force() -> bool:
        found = await cluster.kube.get(QUOTAS, cluster.namespace, "quota")
        return set((found.get("status") or {}).get("used") or {}) == set(hard)

    await until(in_force, "the quota is in force")


async def not_accepted(cluster: Cluster, words: str) -> None:
    """Wait until the job is not accepted, with these words; no pod was created."""

    async def reported() -> bool:
        status, reason, message = await cluster.condition("Accepted")
        return (status, reason) == ("False", "PodsForbidden") and words in message

    await until(reported, f"the condition Accepted with {words!r}")
    assert "a worker of pool a can't be created" in (await cluster.condition("Accepted"))[2]
    assert await cluster.pods() == {}


async def created_pods(operator: Operator) -> float:
    """Return the number of pods that the operator has ever created."""
    return await operator.metric("heterotrain_operator_pods_created_total") or 0


async def accepted(cluster: Cluster) -> None:
    """Wait until the job is accepted."""

    async def probe() -> bool:
        return (await cluster.condition("Accepted"))[0] == "True"

    await until(probe, "the job is accepted")


async def test_a_limit_range_s_default_request_counts_in_the_capacity(cluster: Cluster, operator: Operator) -> None:
    """Workers request nothing themselves. Three of two cores fit on six, and one more waits for a node."""
    before = await created_pods(operator)
    await limit_containers(cluster, defaultRequest={"cpu": "2"})
    await cluster.add_node("a", cpu="6")
    await cluster.create(cluster.job(cluster.pool("a", maxReplicas=8, resources={})))
    await cluster.scheduled(3)

    async def one_waits() -> bool:
        conditions = [each for pod in (await cluster.pods()).values() for each in pod["status"].get("conditions", ())]
        return sum(each.get("reason") == "Unschedulable" for each in conditions) == 1

    await until(one_waits, "one worker is unschedulable")
    pods = await cluster.pods()
    assert len(pods) == 4
    created = await created_pods(operator) - before
    assert created == 4, "only one worker was ever created that has no room"
    requests = {pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] for pod in pods.values()}
    assert requests == {"2"}, "the API server has set the requests"


async def test_a_limit_range_s_maximum_refuses_workers_until_they_are_smaller(
    cluster: Cluster, operator: Operator
) -> None:
    await limit_containers(cluster, max={"cpu": "1"})
    await cluster.add_node("a")
    await cluster.create(cluster.job(cluster.pool("a", resources={"limits": {"cpu": "2"}})))
    await not_accepted(cluster, "maximum cpu usage per Container is 1, but limit is 2")
    await cluster.edit({"workerPools": [cluster.pool("a")]})
    await accepted(cluster)
    await cluster.started(1)


async def test_a_quota_that_needs_a_request_refuses_workers_without_one(cluster: Cluster, operator: Operator) -> None:
    await set_quota(cluster, **{"requests.memory": "4Gi"})
    await cluster.add_node("a")
    await cluster.create(cluster.job(cluster.pool("a")))
    await not_accepted(cluster, "must specify requests.memory")
    await cluster.edit({"workerPools": [cluster.pool("a", resources={"limits": {"cpu": "1", "memory": "1Gi"}})]})
    await accepted(cluster)
    await cluster.started(1)


async def test_a_full_quota_is_reported_and_the_job_trains_with_what_it_allows(
    cluster: Cluster, operator: Operator
) -> None:
    await set_quota(cluster, pods="2")
    await cluster.add_node("a", cpu="8")
    await cluster.create(cluster.job(cluster.pool("a", maxReplicas=4)))
    await cluster.started(2)

    async def reported() -> bool:
        status, _, message = await cluster.condition("Degraded")
        return status == "True" and "exceeded quota: quota, requested: pods=1, used: pods=2, limited: pods=2" in message

    await until(reported, "the condition Degraded with the API server's words")
    assert len(await cluster.pods()) == 2
    await cluster.kube.merge(QUOTAS, cluster.namespace, "quota", {"spec": {"hard": {"pods": "4"}}})
    await cluster.scheduled(4)
