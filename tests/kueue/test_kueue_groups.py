"""Jobs of fixed size in queues of the real Kueue: their workers are one pod group, admitted together or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.kube.resources import NODES
from heterotrain_operator.kube.verbs import Body
from local_cluster.bare import ControlPlane
from support.api_cluster import Cluster, Operator
from support.kueue import GATE, WORKLOADS, Queue
from support.queued_jobs import delete, emptied, evict, gated, obey, placed, queued, trains
from support.waiting import until


def of_three(cluster: Cluster, *pools: Body, **spec: object) -> Body:
    """Return a job of three workers in one group."""
    pools = pools or (cluster.pool("a", maxReplicas=3),)
    return queued(cluster, *pools, group="mine", elasticPolicy={"minReplicas": 3}, **spec)


async def test_a_group_starts_as_a_whole_and_replaces_what_fails_and_what_leaves(
    cluster: Cluster, operator: Operator, queue: Queue
) -> None:
    await queue.create(2)
    await cluster.add_node("a", cpu="8")
    await cluster.create(of_three(cluster))
    await until(lambda: gated(cluster, 3), "all of the group wait")

    async def reported() -> bool:
        _, reason, message = await cluster.condition("Scheduled")
        return reason == "SchedulingGated" and f"job-w0, job-w1, job-w2: its scheduling gates {GATE}" in message

    await until(reported, "the group in the queue is reported")
    assert await queue.reserved() in ("", "0"), "none is admitted alone"

    await queue.allow(3)
    first = await cluster.started(3)
    await cluster.end(first[0], Ending.FAILED, reason="a bug")
    (new,) = set(await until(lambda: placed(cluster, 3), "a replacement is admitted")) - set(first)
    await cluster.run(first[1], first[2], new)
    await until(lambda: trains(cluster, first[1], first[2], new), "it trains")

    await evict(cluster, first[1])

    async def held_back() -> bool:
        return f"no place before they are gone: {first[1]}" in (await cluster.condition("Degraded"))[2]

    await until(held_back, "the worker that leaves keeps its place")
    assert await placed(cluster, 2)
    assert not await gated(cluster, 1), "Kueue would delete a fourth member"
    await obey(cluster)
    await until(lambda: placed(cluster, 3), "its replacement is admitted")
    assert await queue.reserved() == "3"


async def test_a_suspended_group_gives_its_quota_back_and_starts_again(
    cluster: Cluster, operator: Operator, queue: Queue
) -> None:
    """Workers that leave succeed, as Kueue sees it, and failed ones wait to be replaced: neither may keep the quota."""
    await queue.create(3)
    await cluster.add_node("a", cpu="8")
    await cluster.create(of_three(cluster))
    names = await cluster.started(3)
    await cluster.end(names[0], Ending.FAILED, reason="a bug")
    await cluster.edit({"suspend": True})
    await until(lambda: emptied(cluster), "the pods of the suspended job are gone")
    await until(queue.is_unused, "the quota is free again")

    await cluster.edit({"suspend": False})
    await cluster.started(3)
    await cluster.edit({"suspend": True})
    await until(lambda: emptied(cluster), "the pods are gone again")
    await queue.allow(2)
    await cluster.edit({"suspend": False})
    await until(lambda: gated(cluster, 3), "all of the group wait")
    await delete(cluster)
    await until(lambda: emptied(cluster), "nothing of the deleted job is left")
    await until(queue.is_unused, "Kueue keeps nothing")


async def test_a_group_that_kueue_stops_comes_back_when_kueue_lets_it(
    cluster: Cluster, operator: Operator, queue: Queue
) -> None:
    """The workers that leave have succeeded, as Kueue sees it, but the group goes on with their replacements."""
    await queue.create(3)
    await cluster.add_node("a", cpu="8")
    await cluster.create(of_three(cluster))
    await cluster.started(3)
    (workload,) = await queue.workloads()

    async def let(active: bool) -> None:
        patch = {"spec": {"active": active}}
        await cluster.kube.merge(WORKLOADS, cluster.namespace, workload["metadata"]["name"], patch)

    async def replaced() -> list[str]:
        await obey(cluster)
        return await gated(cluster, 3)

    await let(False)
    await until(replaced, "three others wait in its place")
    await let(True)
    names = await until(lambda: placed(cluster, 3), "they are admitted")
    await cluster.run(*names)
    await until(lambda: trains(cluster, *names), "they train")


async def test_the_end_of_a_job_ends_its_group(cluster: Cluster, operator: Operator, queue: Queue) -> None:
    """The pods of a failed job stay for their logs, and Kueue would wait for replacements."""
    await queue.create(3)
    await cluster.add_node("a", cpu="8")
    await cluster.create(of_three(cluster, backoffLimit=0))
    names = await cluster.started(3)
    await cluster.end(names[0], Ending.FAILED, reason="a bug")

    async def only_the_failed() -> bool:
        await obey(cluster)
        return set(await cluster.pods()) == {names[0]}

    await until(only_the_failed, "the other workers are gone")

    async def free() -> bool:
        return await queue.reserved() == "0"

    await until(free, "the quota is free")
    assert set(await cluster.pods()) == {names[0]}
    await delete(cluster)
    await until(lambda: emptied(cluster), "nothing of the deleted job is left")
    await until(queue.is_unused, "Kueue keeps nothing")


async def ready(cluster: Cluster, node: str, status: str) -> None:
    """Report a node as ready or not; the node controller adds and removes the taints."""
    conditions = [{"type": "Ready", "status": status, "reason": "simulated", "message": "simulated"}]
    path, kind = NODES.path(None, node, "status"), "application/merge-patch+json"
    await cluster.kube._call("PATCH", path, body={"status": {"conditions": conditions}}, content_type=kind)


async def test_a_worker_on_a_lost_node_is_replaced_once_the_node_is_out_of_service(
    cluster: Cluster, queue: Queue, plane: ControlPlane, tmp_path: Path
) -> None:
    log = tmp_path / "operator.log"
    operator = Operator(cluster.namespace, log, f"--kubeconfig={plane.kubeconfig}")
    await queue.create(3)
    node = await cluster.add_node("b")
    await cluster.add_node("a")
    await operator.start()
    try:
        await cluster.create(of_three(cluster, cluster.pool("a", maxReplicas=2), cluster.pool("b")))
        await cluster.started(3)
        (lost,) = [name for name, pod in (await cluster.pods()).items() if pod["spec"]["nodeName"] == node]
        uid = (await cluster.pods())[lost]["metadata"]["uid"]
        await ready(cluster, node, "Unknown")
        await evict(cluster, lost)
        taint = "node.kubernetes.io/out-of-service"
        await asyncio.to_thread(plane.kubectl, "taint", "nodes", node, f"{taint}=nodeshutdown:NoExecute")

        async def replaced() -> bool:
            return uid not in [each["metadata"]["uid"] for each in (await cluster.pods()).values()]

        await until(replaced, "nothing keeps the pod on the lost node", timeout_s=150)
        await asyncio.to_thread(plane.kubectl, "taint", "nodes", node, f"{taint}-")
        await ready(cluster, node, "True")
        await until(lambda: placed(cluster, 3), "its replacement is admitted")
    finally:
        await operator.stop()
        print(log.read_text())
