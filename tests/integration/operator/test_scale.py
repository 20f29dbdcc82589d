"""The scale subresource, by which ``kubectl scale`` and autoscalers change a job."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import Rejected, Unavailable
from heterotrain_operator.kube.resources import JOBS, PODS
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import Cluster, Operator
from support.waiting import until


class Scale:
    """The scale subresource of a test's job."""

    def __init__(self, cluster: Cluster) -> None:
        self._kube: KubeClient = cluster.kube
        self._path = JOBS.path(cluster.namespace, "job", "scale")

    async def read(self) -> Body:
        """Return it as an autoscaler reads it."""
        return await self._kube._call("GET", self._path)

    async def set(self, replicas: int) -> Body:
        """Set the number of workers as ``kubectl scale`` does: by a patch."""
        patch = {"spec": {"replicas": replicas}}
        return await self._kube._call("PATCH", self._path, body=patch, content_type="application/merge-patch+json")


def a_job(cluster: Cluster, **policy: int) -> Body:
    return cluster.job(cluster.pool("a", maxReplicas=4), elasticPolicy={"minReplicas": 2, **policy})


async def test_scale_reads_and_sets_the_maximum_number_of_workers(cluster: Cluster) -> None:
    await cluster.create(a_job(cluster, maxReplicas=6))
    scale = Scale(cluster)
    assert (await scale.read())["spec"]["replicas"] == 6
    assert (await scale.set(3))["spec"]["replicas"] == 3
    job = await cluster.kube.get(JOBS, cluster.namespace, "job")
    assert job["spec"]["elasticPolicy"]["maxReplicas"] == 3


@pytest.mark.parametrize(
    ("replicas", "sentence"),
    [
        (1, "minReplicas is larger than maxReplicas: lower minReplicas or raise maxReplicas"),
        (0, "should be greater than or equal to 1"),
        (101, "the batch is too small for the maximum number of processes"),
    ],
)
async def test_scale_keeps_to_the_rules_of_the_job(cluster: Cluster, replicas: int, sentence: str) -> None:
    await cluster.create(a_job(cluster, maxReplicas=6))
    with pytest.raises(Rejected) as rejected:
        await Scale(cluster).set(replicas)
    assert sentence in str(rejected.value)
    assert (await Scale(cluster).read())["spec"]["replicas"] == 6


async def test_without_a_maximum_scale_cannot_be_read_but_set(cluster: Cluster) -> None:
    """An autoscaler reads first, so it needs maxReplicas in the job; ``kubectl scale`` only sets."""
    await cluster.create(a_job(cluster))
    scale = Scale(cluster)
    with pytest.raises(Unavailable, match=r"elasticPolicy\.maxReplicas.* does not exist"):
        await scale.read()
    await scale.set(3)
    assert (await scale.read())["spec"]["replicas"] == 3


async def test_scale_reports_the_workers_and_their_selector_and_changes_their_number(
    cluster: Cluster, operator: Operator
) -> None:
    await cluster.add_node("a", cpu="4")
    await cluster.create(a_job(cluster, maxReplicas=4))
    scale = Scale(cluster)
    workers = set(await cluster.started(4))

    async def reports(count: int) -> bool:
        return (await scale.read())["status"].get("replicas") == count

    await until(lambda: reports(4), "scale reports four workers")
    selector = (await scale.read())["status"]["selector"]
    selected = cluster.kube.list(PODS, cluster.namespace, labels=selector)
    assert {pod["metadata"]["name"] async for pod in selected} == workers
    await scale.set(2)

    async def leaving() -> list[str]:
        found = [name for name, pod in (await cluster.pods()).items() if "deletionTimestamp" in pod["metadata"]]
        return found if len(found) == 2 else []

    for name in await until(leaving, "two workers leave"):
        await cluster.end(name, Ending.LEFT, reason="drained")
    await cluster.confirm_deletions()

    async def fewer() -> bool:
        return len(await cluster.members()) == 2 and await reports(2)

    await until(fewer, "the job trains with two workers")
