"""Two jobs that compete for nodes, with an operator process and the real API server and scheduler."""

from __future__ import annotations

from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.kube.resources import JOBS, PODS
from support.api_cluster import Body, Cluster, Operator
from support.waiting import until


def competing_job(cluster: Cluster, name: str) -> Body:
    """Return a job that needs two workers on pool a and can use four."""
    return cluster.job(cluster.pool("a", maxReplicas=4), name=name, elasticPolicy={"minReplicas": 2})


async def leaving_pods(cluster: Cluster, job: str) -> list[str]:
    """Return the pods of a job that are being deleted."""
    return [name for name, pod in (await cluster.pods(job)).items() if "deletionTimestamp" in pod["metadata"]]


async def granted(cluster: Cluster, job: str) -> int | None:
    """Return the granted workers of a job in pool a; ``None`` without limits."""
    pools = (await cluster.status(job)).get("pools", [])
    return next((pool.get("granted") for pool in pools), None)


async def run_scheduled(cluster: Cluster, job: str) -> None:
    """Run every pod of a job that has a node."""
    pods = await cluster.pods(job)
    waiting = [n for n, pod in pods.items() if pod["spec"].get("nodeName") and pod["status"]["phase"] == "Pending"]
    await cluster.run(*waiting)


async def running_members(cluster: Cluster, job: str, count: int) -> list[str]:
    """Run every scheduled pod of a job, and wait until its plan names this many."""

    async def probe() -> list[str]:
        await run_scheduled(cluster, job)
        members = await cluster.members(job)
        return members if len(members) == count else []

    found: list[str] = await until(probe, f"a plan of {job} with {count} members")
    return found


async def test_a_new_job_gets_its_part_and_returns_it_at_its_end(cluster: Cluster, operator: Operator) -> None:
    await cluster.add_node("a", cpu="4")
    await cluster.create(competing_job(cluster, "old"))
    await running_members(cluster, "old", 4)
    assert await granted(cluster, "old") is None, "alone, it uses all nodes that fit"
    newcomer = await cluster.create(competing_job(cluster, "new"))

    async def one_leaves() -> list[str]:
        await run_scheduled(cluster, "new")
        return await leaving_pods(cluster, "old")

    (first,) = await until(one_leaves, "one worker of the old job leaves, as long as none of the new one has started")
    assert (await cluster.condition("WorkersLimited", "old"))[:2] == ("True", "NodesShared")
    message = (await cluster.condition("WorkersLimited", "old"))[2]
    assert "other jobs need them more" in message
    assert message.endswith("; the next member lacks a worker of a")
    await cluster.end(first, Ending.LEFT, reason="drained")
    await cluster.confirm_deletions()
    (second,) = await until(one_leaves, "another worker leaves once the new job's first one is ready")
    await cluster.end(second, Ending.LEFT, reason="drained")
    await cluster.confirm_deletions()
    await running_members(cluster, "new", 2)
    await running_members(cluster, "old", 2)
    assert (await granted(cluster, "old"), await granted(cluster, "new")) == (2, 2)
    status = await cluster.status("old")
    assert (status["disruptions"], status["restarts"]) == (0, 0)
    assert (await cluster.reasons())["WorkersAllocated"] >= 2
    await cluster.kube.delete(JOBS, cluster.namespace, "new", uid=newcomer["metadata"]["uid"])

    async def gone() -> bool:
        await cluster.confirm_deletions()
        return not await cluster.pods("new")

    await until(gone, "the new job's workers are gone")
    await running_members(cluster, "old", 4)

    async def unlimited() -> bool:  # the status follows the plan
        return await granted(cluster, "old") is None

    await until(unlimited, "the old job may use all nodes again")


async def test_of_two_gangs_that_arrive_together_one_runs(cluster: Cluster, operator: Operator) -> None:
    """Capacity for three, two workers each: without an allocation, each job could block the other."""
    await cluster.add_node("a", cpu="3")
    for name in ("first", "second"):
        await cluster.create(competing_job(cluster, name))

    async def one_runs() -> str:
        for name in ("first", "second"):
            pods = await cluster.pods(name)
            placed = [n for n, pod in pods.items() if pod["spec"].get("nodeName")]
            await cluster.run(*(n for n in placed if pods[n]["status"]["phase"] == "Pending"))
            await cluster.confirm_deletions()
            if len(await cluster.members(name)) >= 2:
                return name
        return ""

    winner = await until(one_runs, "one of the two jobs trains")
    (loser,) = {"first", "second"} - {winner}

    async def reported() -> bool:
        return (await cluster.condition("WorkersLimited", loser))[:2] == ("True", "WaitingForNodes")

    await until(reported, "the other job reports that it waits")
    found = [pod async for pod in cluster.kube.list(PODS, cluster.namespace) if pod["spec"].get("nodeName")]
    assert len(found) <= 3
