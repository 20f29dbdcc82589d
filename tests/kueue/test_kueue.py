"""Jobs in queues of the real Kueue: admitted in parts or as a group, with failures, suspension and a changed quota."""

from __future__ import annotations

from typing import Any

from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.kube.resources import JOBS
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import Cluster, Operator
from support.kueue import GATE, GROUP, QUEUE, Queue
from support.waiting import until


def queued(cluster: Cluster, *pools: Body, group: str = "", **spec: Any) -> Body:
    """Return a job whose workers request one core each and wait in the queue, in one group if it has a name."""
    labels = {f"{GROUP}/queue-name": QUEUE, **({f"{GROUP}/pod-group-name": group} if group else {})}
    main = {"name": "main", "image": "image.invalid/none:1", "resources": {"requests": {"cpu": "1"}}}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [main]}}
    return cluster.job(*pools, template=template, **spec)


async def gated(cluster: Cluster, number: int) -> list[str]:
    """Return the names of the pods behind Kueue's gate, if there are so many."""
    pods = await cluster.pods()
    found = sorted(name for name, pod in pods.items() if {"name": GATE} in pod["spec"].get("schedulingGates", []))
    return found if len(found) == number else []


async def trains(cluster: Cluster, *names: str) -> bool:
    """Return whether exactly these workers have shares."""
    return set(await cluster.members()) == set(names)


async def emptied(cluster: Cluster) -> bool:
    """Act as kubelets whose pods end; return whether none is left."""
    for name, pod in (await cluster.pods()).items():
        if "deletionTimestamp" in pod["metadata"] and (pod.get("status") or {}).get("phase") == "Running":
            await cluster.end(name, Ending.LEFT)
    await cluster.confirm_deletions()
    return not await cluster.pods()


async def delete(cluster: Cluster) -> None:
    """Delete the job."""
    found = await cluster.kube.get(JOBS, cluster.namespace, "job")
    await cluster.kube.delete(JOBS, cluster.namespace, "job", uid=found["metadata"]["uid"])


async def test_an_elastic_job_trains_with_what_the_quota_admits_and_grows_with_it(
    cluster: Cluster, operator: Operator, queue: Queue
) -> None:
    await queue.create(2)
    await cluster.add_node("a")
    await cluster.create(queued(cluster, cluster.pool("a", maxReplicas=3)))
    first = await cluster.started(2)
    (third,) = await until(lambda: gated(cluster, 1), "the third pod waits")
    assert third not in first

    async def named() -> bool:
        _, reason, message = await cluster.condition("Degraded")
        return reason == "SchedulingGated" and message.startswith(
            f"2 of 3 workers train; {third}: its scheduling gates {GATE}"
        )

    await until(named, "the worker in the queue is reported")
    assert (await cluster.status())["state"] == "Degraded"

    await queue.allow(3)
    await cluster.scheduled(3)
    await cluster.run(*first, third)
    await until(lambda: trains(cluster, *first, third), "the third worker trains")

    await cluster.edit({"suspend": True})
    await until(lambda: emptied(cluster), "the pods of the suspended job are gone")
    await until(queue.is_unused, "the quota is free again")

    await cluster.edit({"suspend": False})
    await cluster.started(3)
    await delete(cluster)
    await until(lambda: emptied(cluster), "nothing of the deleted job is left")
    await until(queue.is_unused, "the quota is free again")
