"""The operator process on a real API server: a job's way to its members, losses, restarts and bad input."""

from __future__ import annotations

import asyncio
from pathlib import Path

from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.resources import CONFIG_MAPS, DISRUPTION_BUDGETS, JOBS, PODS
from support.api_cluster import Cluster, Operator
from support.waiting import until

SPOT_NOTICE = "aws-node-termination-handler/spot-itn"


async def state_is(cluster: Cluster, wanted: str, name: str = "job") -> None:
    async def probe() -> bool:
        return (await cluster.status(name)).get("state") == wanted

    await until(probe, f"state {wanted} of {name}")


async def members_are(cluster: Cluster, *names: str) -> None:
    async def probe() -> bool:
        return sorted(await cluster.members()) == sorted(names)

    await until(probe, f"members {names}")


async def test_a_job_trains_and_succeeds(cluster: Cluster, operator: Operator) -> None:
    await cluster.add_node("a")
    await cluster.add_node("b")
    await cluster.create(cluster.job())
    names = await cluster.started(2)
    await state_is(cluster, "Running")
    plan = await cluster.plan()
    assert [member["share_samples"] for member in plan["members"]] == [50, 50]

    async def touched() -> bool:
        version = f"{plan['generation']}.{plan['revision']}"
        pods = await cluster.pods()
        return all(pods[name]["metadata"]["annotations"][keys.ANNOTATION_PLAN] == version for name in names)

    await until(touched, "every pod's annotation names the plan")
    for name in names:
        await cluster.end(name, Ending.FINISHED, reason="done")
    await state_is(cluster, "Succeeded")

    async def announced() -> bool:  # events follow the status
        return "Succeeded" in await cluster.reasons()

    await until(announced, "the event of the end")
    reasons = await cluster.reasons()
    assert (reasons["TrainingStarted"], reasons["Succeeded"]) == (1, 1)


async def test_no_finalizer_and_no_kopf_annotation_is_left_on_any_object(cluster: Cluster, operator: Operator) -> None:
    await cluster.add_node("a")
    await cluster.create(cluster.job(cluster.pool("a")))
    (name,) = await cluster.started(1)
    job = await cluster.kube.get(JOBS, cluster.namespace, "job")
    pod = (await cluster.pods())[name]
    for body in (job, pod):
        assert "finalizers" not in body["metadata"]
        assert not [key for key in body["metadata"].get("annotations", {}) if "kopf" in key]


async def test_a_pool_without_a_node_delays_nothing_and_is_reported(cluster: Cluster, operator: Operator) -> None:
    await cluster.add_node("a")
    await cluster.create(cluster.job())
    await cluster.started(1)
    await state_is(cluster, "Degraded")
    _, reason, message = await cluster.condition("Degraded")
    assert reason == "InsufficientCapacity"
    assert "pool b" in message
    await cluster.add_node("b")
    (newcomer,) = set(await cluster.scheduled(2)) - set(await cluster.members())
    await cluster.run(newcomer)
    await state_is(cluster, "Running")


async def test_too_few_nodes_are_reported_with_the_scheduler_s_message(cluster: Cluster, operator: Operator) -> None:
    await cluster.add_node("a", cpu="1")
    await cluster.create(cluster.job(cluster.pool("a", maxReplicas=2), elasticPolicy={"minReplicas": 2}))

    async def reported() -> bool:
        status, reason, message = await cluster.condition("Scheduled")
        return (status, reason) == ("False", "Unschedulable") and "nodes are available" in message

    await until(reported, "the condition Scheduled with the scheduler's message")
    await state_is(cluster, "Pending")


async def test_an_announced_node_is_drained_and_its_worker_comes_back(cluster: Cluster, operator: Operator) -> None:
    await cluster.add_node("a")
    node = await cluster.add_node("b")
    await cluster.create(cluster.job(cluster.pool("a"), cluster.pool("b", capacityType="Spot")))
    names = await cluster.started(2)
    pods = await cluster.pods()
    (drained_pod,) = [name for name in names if pods[name]["spec"]["nodeName"] == node]
    (stayer,) = set(names) - {drained_pod}
    await cluster.set_taints(node, SPOT_NOTICE)

    async def drained() -> bool:
        return (await cluster.plan())["drain"] == [drained_pod]

    await until(drained, "the plan's drain list")
    await cluster.end(drained_pod, Ending.LEFT, reason="drained")
    await members_are(cluster, stayer)
    await cluster.set_taints(node)

    async def newcomers() -> set[str]:
        return set(await cluster.scheduled(1)) - {stayer, drained_pod}

    (newcomer,) = await until(newcomers, "a replacement for the drained worker")
    await cluster.run(newcomer)
    await members_are(cluster, stayer, newcomer)
    status = await cluster.status()
    assert (status["disruptions"], status["restarts"]) == (1, 0)


async def test_a_damaged_and_a_deleted_plan_are_replaced_by_higher_versions(
    cluster: Cluster, operator: Operator, kube: KubeClient
) -> None:
    await cluster.add_node("a")
    await cluster.create(cluster.job(cluster.pool("a")))
    names = await cluster.started(1)
    before = await cluster.plan()
    patch = {"data": {keys.PLAN_KEY: "{}"}}
    await kube.merge(CONFIG_MAPS, cluster.namespace, keys.plan_name("job"), patch)

    async def higher(than: int) -> bool:
        plan = await cluster.plan()
        return bool(plan) and plan.get("revision", -1) > than

    await until(lambda: higher(before["revision"]), "a plan above the damaged one")
    repaired = await cluster.plan()
    assert repaired["generation"] > before["generation"]
    found = await kube.get(CONFIG_MAPS, cluster.namespace, keys.plan_name("job"))
    await kube.delete(CONFIG_MAPS, cluster.namespace, keys.plan_name("job"), uid=found["metadata"]["uid"])
    await until(lambda: higher(repaired["revision"]), "a plan above the deleted one")
    assert await cluster.members() == names


async def test_a_killed_operator_misses_nothing_and_counts_nothing_twice(
    cluster: Cluster, own_operator: Operator, namespace: str, tmp_path: Path
) -> None:
    """Without an operator, one worker fails and another is evicted; the next operator counts each of them once."""
    for name in ("a", "b", "c"):
        await cluster.add_node(name)
    await cluster.create(cluster.job(*(cluster.pool(name) for name in ("a", "b", "c"))))
    names = await cluster.started(3)
    await state_is(cluster, "Running")
    await own_operator.kill()
    failing, evicted, stayer = names
    await cluster.end(failing, Ending.FAILED, reason="boom")
    pod = (await cluster.pods())[evicted]
    await cluster.kube.delete(PODS, namespace, evicted, uid=pod["metadata"]["uid"])
    await cluster.confirm_deletions()
    successor = Operator(namespace, tmp_path / "successor.log")
    await successor.start()
    try:

        async def accounted() -> bool:
            status = await cluster.status()
            return (status["restarts"], status["disruptions"]) == (1, 1)

        await until(accounted, "one restart and one disruption")
        await members_are(cluster, stayer)
        await successor.kill()
        third = Operator(namespace, tmp_path / "third.log", "--relist-seconds", "0.5")
        await third.start()
        try:
            await passes(third, 3)
            assert await accounted()
        finally:
            await third.stop()
    finally:
        await successor.stop()


async def passes(operator: Operator, more: int) -> None:
    """Wait until the operator has made this many more passes over jobs."""
    name = 'heterotrain_operator_reconcile_total{result="ok"}'
    before = await operator.metric(name) or 0

    async def probe() -> bool:
        return (await operator.metric(name) or 0) >= before + more

    await until(probe, f"{more} more passes")


async def test_a_planned_end_hands_the_lease_over(own_operator: Operator, namespace: str, tmp_path: Path) -> None:
    assert await own_operator.stop() == 0
    successor = Operator(namespace, tmp_path / "successor.log")
    await successor.start()
    assert await successor.stop() == 0


async def test_nothing_is_written_while_nothing_changes(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    await cluster.add_node("a")
    operator = Operator(namespace, tmp_path / "operator.log", "--relist-seconds", "0.5")
    await operator.start()
    try:
        await cluster.create(cluster.job(cluster.pool("a")))
        (name,) = await cluster.started(1)
        await state_is(cluster, "Running")
        await passes(operator, 2)

        async def versions() -> list[str]:
            objects = [
                await cluster.kube.get(JOBS, namespace, "job"),
                await cluster.kube.get(CONFIG_MAPS, namespace, keys.plan_name("job")),
                await cluster.kube.get(PODS, namespace, name),
            ]
            return [body["metadata"]["resourceVersion"] for body in objects]

        before = await versions()
        await passes(operator, 5)
        assert await versions() == before
    finally:
        await operator.stop()


async def test_deleted_objects_are_created_again_after_the_next_full_list(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    operator = Operator(namespace, tmp_path / "operator.log", "--relist-seconds", "0.5")
    await operator.start()
    try:
        await cluster.add_node("a")
        await cluster.add_node("b")
        await cluster.create(cluster.job())
        await cluster.started(2)
        name = keys.disruption_budget_name("job")

        async def there() -> str:
            budgets = cluster.kube.list(DISRUPTION_BUDGETS, namespace)
            return {b["metadata"]["name"]: b["metadata"]["uid"] async for b in budgets}.get(name, "")

        uid = await until(there, f"{name} exists")
        await cluster.kube.delete(DISRUPTION_BUDGETS, namespace, name, uid=uid)

        async def new() -> bool:
            return await there() not in ("", uid)

        await until(new, f"{name} exists again")
    finally:
        await operator.stop()


async def test_deleting_a_job_leaves_nothing(cluster: Cluster, own_operator: Operator) -> None:
    """The garbage collector follows owner references, with or without an operator."""
    await cluster.add_node("a")
    body = await cluster.create(cluster.job(cluster.pool("a")))
    await cluster.started(1)
    await own_operator.stop()
    await cluster.kube.delete(JOBS, cluster.namespace, "job", uid=body["metadata"]["uid"])

    async def left() -> list[str]:
        await cluster.confirm_deletions()
        labels = f"{keys.LABEL_JOB}=job"
        found = []
        for resource in (PODS, CONFIG_MAPS, DISRUPTION_BUDGETS):
            found += [
                b["metadata"]["name"] async for b in cluster.kube.list(resource, cluster.namespace, labels=labels)
            ]
        return found

    async def nothing() -> bool:
        return not await left()

    await until(nothing, "all objects of the job are gone")


async def test_a_drain_takes_one_on_demand_worker_at_a_time(
    cluster: Cluster, operator: Operator, kube: KubeClient
) -> None:
    for name in ("a", "b"):
        await cluster.add_node(name)
    await cluster.create(cluster.job())
    await cluster.started(2)

    async def guarded() -> bool:
        budgets = [budget async for budget in kube.list(DISRUPTION_BUDGETS, cluster.namespace)]
        found = [(each["spec"]["minAvailable"], each.get("status", {}).get("disruptionsAllowed")) for each in budgets]
        return found == [(1, 1)]

    await until(guarded, "one of two may be evicted")


async def test_many_jobs_at_once_are_all_served(cluster: Cluster, operator: Operator) -> None:
    await cluster.add_node("a", cpu="40")
    await asyncio.gather(*(cluster.create(cluster.job(cluster.pool("a"), name=f"job{i}")) for i in range(20)))

    async def all_placed() -> bool:
        pods = [pod async for pod in cluster.kube.list(PODS, cluster.namespace)]
        return len([pod for pod in pods if pod["spec"].get("nodeName")]) == 20

    await until(all_placed, "20 jobs have a worker each")
