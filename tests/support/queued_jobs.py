"""Jobs in a queue of Kueue, and what a test sees and does as their kubelets."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.decide.plugins.kueue.plugin import GROUP as QUEUE_GROUP
from heterotrain_operator.kube.errors import NotFound
from heterotrain_operator.kube.resources import JOBS, PODS
from heterotrain_operator.kube.verbs import Body

from support.api_cluster import Cluster
from support.kueue import GATE, GROUP, QUEUE


def queued(cluster: Cluster, *pools: Body, group: str = "", **spec: Any) -> Body:
    """Return a job whose workers request one core each and wait in the queue, in one group if it has a name."""
    labels = {f"{GROUP}/queue-name": QUEUE, **({QUEUE_GROUP: group} if group else {})}
    main = {"name": "main", "image": "image.invalid/none:1", "resources": {"requests": {"cpu": "1"}}}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [main]}}
    return cluster.job(*pools, template=template, **spec)


async def gated(cluster: Cluster, number: int) -> list[str]:
    """Return the names of the pods behind Kueue's gate, if there are so many."""
    pods = await cluster.pods()
    found = sorted(name for name, pod in pods.items() if {"name": GATE} in pod["spec"].get("schedulingGates", []))
    return found if len(found) == number else []


async def placed(cluster: Cluster, number: int) -> list[str]:
    """Return the names of the pods that have a node and go on, if there are so many."""
    found = [name for name, pod in (await cluster.pods()).items() if pod["spec"].get("nodeName") and not _ends(pod)]
    return sorted(found) if len(found) == number else []


async def trains(cluster: Cluster, *names: str) -> bool:
    """Return whether exactly these workers have shares."""
    return set(await cluster.members()) == set(names)


async def evict(cluster: Cluster, name: str) -> None:
    """Delete a pod, as whoever drains its node does."""
    pod = (await cluster.pods())[name]
    await cluster.kube.delete(PODS, cluster.namespace, name, uid=pod["metadata"]["uid"])


async def obey(cluster: Cluster) -> None:
    """Act as kubelets: workers that are being deleted leave, with exit code 0, and their pods go."""
    for name, pod in (await cluster.pods()).items():
        if "deletionTimestamp" in pod["metadata"] and pod["status"]["phase"] == "Running":
            with suppress(NotFound):  # nothing kept it
                await cluster.end(name, Ending.LEFT)
    await cluster.confirm_deletions()


async def emptied(cluster: Cluster) -> bool:
    """Act as kubelets; return whether no pod is left."""
    await obey(cluster)
    return not await cluster.pods()


async def delete(cluster: Cluster) -> None:
    """Delete the job."""
    found = await cluster.kube.get(JOBS, cluster.namespace, "job")
    await cluster.kube.delete(JOBS, cluster.namespace, "job", uid=found["metadata"]["uid"])


def _ends(pod: Body) -> bool:
    return "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] in ("Succeeded", "Failed")
