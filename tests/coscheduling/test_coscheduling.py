"""Jobs with a PodGroup of the real coscheduling plugin: their minimum of workers is placed together or not at all."""

from __future__ import annotations

from heterotrain_operator.kube.resources import PODS
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import Cluster, Operator
from support.coscheduling import GROUPS
from support.waiting import until

MAIN = {"name": "main", "image": "image.invalid/none:1", "resources": {"requests": {"cpu": "1"}}}


def job_of_three(cluster: Cluster, **spec: object) -> Body:
    """Return a job whose minimum is three workers of one core."""
    return cluster.job(
        cluster.pool("a", maxReplicas=3),
        elasticPolicy={"minReplicas": 3},
        template={"spec": {"containers": [MAIN]}},
        **spec,
    )


async def occupy(cluster: Cluster, node: str) -> Body:
    """Put a foreign pod onto a node, which needs one core there."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "foreign", "namespace": cluster.namespace},
        "spec": {"nodeName": node, "containers": [MAIN]},
    }
    return await cluster.kube.create(PODS, pod)


async def placed(cluster: Cluster) -> list[str]:
    """Return the names of the job's pods that have a node."""
    return sorted(name for name, pod in (await cluster.pods()).items() if pod["spec"].get("nodeName"))


async def refused(cluster: Cluster, number: int) -> list[str]:
    """Return what the scheduler says of the pods without a node, if it has looked at so many."""
    found = [
        each["message"]
        for pod in (await cluster.pods()).values()
        for each in pod["status"].get("conditions", [])
        if each["type"] == "PodScheduled" and each["status"] == "False"
    ]
    return found if len(found) == number else []


async def test_a_gang_gets_no_node_until_there_is_room_for_all_of_it(cluster: Cluster, operator: Operator) -> None:
    """Two of three workers would fit. The plugin keeps both back; when room is made, it places all three."""
    node = await cluster.add_node("a", cpu="3")
    foreign = await occupy(cluster, node)
    await cluster.create(job_of_three(cluster, podGroup={"scheduler": "Coscheduling"}))
    messages = await until(lambda: refused(cluster, 3), "the plugin has refused all three")
    assert any("PodGroup" in message and "gets rejected" in message for message in messages), messages
    assert await placed(cluster) == []
    group = await cluster.kube.get(GROUPS, cluster.namespace, "job-workers")
    assert group["spec"]["minMember"] == 3

    await cluster.kube.delete(PODS, cluster.namespace, "foreign", uid=foreign["metadata"]["uid"], grace_s=0)
    names = await cluster.started(3)

    async def trains() -> bool:
        return set(await cluster.members()) == set(names)

    await until(trains, "all three train")

    async def phase() -> bool:
        found = await cluster.kube.get(GROUPS, cluster.namespace, "job-workers")
        return (found.get("status") or {}).get("phase") == "Running"

    await until(phase, "the plugin's controller counts the group's pods as running")


async def test_without_a_group_the_workers_that_fit_get_their_nodes(cluster: Cluster, operator: Operator) -> None:
    """So it is the group that keeps the gang of the other test together."""
    node = await cluster.add_node("a", cpu="3")
    await occupy(cluster, node)
    await cluster.create(job_of_three(cluster))
    await cluster.scheduled(2)
