"""Elastic jobs in queues of the real Kueue: each worker is admitted alone."""

from __future__ import annotations

from support.api_cluster import Cluster, Operator
from support.kueue import GATE, Queue
from support.queued_jobs import delete, emptied, gated, queued, trains
from support.waiting import until


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
