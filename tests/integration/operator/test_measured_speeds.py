"""Measured speeds and deadlines: an operator process, the real API server, and a simulated Prometheus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_operator.kube.resources import PODS
from support.api_cluster import Cluster, Operator
from support.simulated_prometheus import SimulatedPrometheus
from support.waiting import until

BATCH = 300


def even(samples_per_s: float) -> ComputeTime:
    """Return a rank without any fixed part."""
    third = 1 / samples_per_s / 3
    return ComputeTime(per_sample_s=third, fixed_s=0.0, backward_per_sample_s=2 * third, backward_fixed_s=0.0)


@pytest.fixture
async def prometheus() -> AsyncIterator[SimulatedPrometheus]:
    """Ranks of pool a are four times as fast as those of pool b; an epoch has 300,000 samples."""
    found = SimulatedPrometheus({"a": even(400), "b": even(100)}, epoch_samples=300_000)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


def an_operator(namespace: str, log: Path, prometheus: SimulatedPrometheus) -> Operator:
    options = ("--prometheus-url", prometheus.url, "--prometheus-poll-seconds", "0.2")
    return Operator(namespace, log, *options)


async def shares(cluster: Cluster, prometheus: SimulatedPrometheus) -> dict[str, int]:
    """Run every pod on a node and train by the newest plan; return the plan's shares by pool."""
    pods = await cluster.pods()
    ready = [n for n, pod in pods.items() if pod["spec"].get("nodeName") and pod["status"]["phase"] == "Pending"]
    await cluster.run(*ready)
    plan = await cluster.plan()
    prometheus.train(plan)
    return {member["pool"]: member["share_samples"] for member in plan.get("members", [])}


async def leave(cluster: Cluster, pool: str) -> None:
    """End the pods of a pool that are being deleted."""
    for name, pod in (await cluster.pods()).items():
        if pod["metadata"]["labels"]["heterotrain.dev/pool"] == pool and "deletionTimestamp" in pod["metadata"]:
            await cluster.end(name, Ending.LEFT, reason="drained")
    await cluster.confirm_deletions()


async def test_a_restarted_operator_gives_a_returning_worker_its_pool_s_share_at_once(
    cluster: Cluster, namespace: str, tmp_path: Path, prometheus: SimulatedPrometheus
) -> None:
    """No member of pool b is left when the operator restarts; its speed is in the job's status."""
    await cluster.add_node("a")
    node = await cluster.add_node("b")
    operator = an_operator(namespace, tmp_path / "operator.log", prometheus)
    await operator.start()
    training = {"globalBatchSize": BATCH, "rebalance": {"boundary": "Steps", "everySteps": 5}}
    await cluster.create(cluster.job(training=training))

    async def learned() -> bool:
        found = await shares(cluster, prometheus)
        kept = {
            pool["name"]: pool.get("speed", {}).get("samples", 0)
            for pool in (await cluster.status()).get("internal", {}).get("pools", [])
        }
        return found.keys() == {"a", "b"} and 55 <= found["b"] <= 65 and 55 <= kept["b"] <= 65

    await until(learned, "shares of 4 : 1, and the speeds in the status")
    await cluster.set_taints(node, "away")
    (gone,) = [n for n, pod in (await cluster.pods()).items() if pod["spec"].get("nodeName") == node]
    pod = (await cluster.pods())[gone]
    await cluster.kube.delete(PODS, namespace, gone, uid=pod["metadata"]["uid"])
    await leave(cluster, "b")

    async def alone() -> bool:
        return await shares(cluster, prometheus) == {"a": BATCH}

    await until(alone, "pool a trains alone")
    await operator.kill()
    successor = an_operator(namespace, tmp_path / "successor.log", prometheus)
    await successor.start()
    try:
        await cluster.set_taints(node)
        found: list[dict[str, int]] = []

        async def back() -> bool:
            found.append(await shares(cluster, prometheus))
            return found[-1].keys() == {"a", "b"}

        await until(back, "the worker of pool b is back")
        assert 55 <= found[-1]["b"] <= 65, f"the first plan that names it again: {found[-1]}"
    finally:
        await successor.stop()
        print((tmp_path / "successor.log").read_text())


async def test_a_deadline_uses_enough_pools_and_is_reported_when_out_of_reach(
    cluster: Cluster, namespace: str, tmp_path: Path, prometheus: SimulatedPrometheus
) -> None:
    """300,000 samples take 50 minutes on the cheap pool alone, and 10 on both."""
    for name in ("a", "b"):
        await cluster.add_node(name)
    operator = an_operator(namespace, tmp_path / "operator.log", prometheus)
    await operator.start()

    def within(minutes: float) -> dict[str, str]:
        return {"deadline": (datetime.now(UTC) + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")}

    async def are(pools: set[str], *expected: str) -> None:
        """Wait until these pools train and the condition has this status and reason."""

        async def probe() -> bool:
            found = await shares(cluster, prometheus)
            for pool in {"a", "b"} - pools:
                await leave(cluster, pool)
            return found.keys() == pools and (await cluster.condition("DeadlineAtRisk"))[:2] == expected

        await until(probe, f"{pools} train, and the deadline is {expected}")

    try:
        pools = (cluster.pool("a", pricePerHour="5.0"), cluster.pool("b", pricePerHour="1.0"))
        training = {"globalBatchSize": BATCH, "rebalance": {"boundary": "Steps", "everySteps": 5}}
        await cluster.create(cluster.job(*pools, training=training, objective="Deadline", **within(120)))
        await are({"b"}, "False", "OnTrack")
        assert (await cluster.condition("WorkersLimited"))[:2] == ("True", "EnoughForDeadline")
        status = await cluster.status()
        assert (status["restarts"], status["disruptions"]) == (0, 0)
        await cluster.edit(within(30))
        await are({"a", "b"}, "False", "OnTrack")  # both together cost less for a sample than the fast one alone
        await cluster.edit(within(3))
        await are({"a", "b"}, "True", "Late")
        assert "7" in (await cluster.condition("DeadlineAtRisk"))[2]

        async def reported() -> bool:
            return "DeadlineAtRisk" in await cluster.reasons()

        await until(reported, "the event")
    finally:
        await operator.stop()
        print((tmp_path / "operator.log").read_text())
