"""Urgent passes wait for nothing that other jobs do: no pass, no thread, and no call that can come later."""

from __future__ import annotations

import asyncio
import json

import pytest
from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.engine.memory import JobMemory
from support.fake_cluster import FakeCluster, a_running_job, job_body
from support.fakes import FakeKube
from support.operator_app import an_app
from support.waiting import until

WAIT_S = 60.0
OTHER = JobKey("ns", "other")


def stored(kube: FakeKube, cluster: FakeCluster) -> None:
    """Put all objects of a cluster into the API server."""
    assert cluster.plan is not None
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job
    kube.objects["configmaps", "ns", keys.plan_name("job")] = cluster.plan
    for kind, bodies in (("pods", cluster.pods), ("nodes", cluster.nodes)):
        for body in bodies.values():
            metadata = body["metadata"]
            kube.objects[kind, metadata.get("namespace", ""), metadata["name"]] = body


async def test_a_node_s_warning_waits_for_no_pass_over_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only worker for all jobs is busy, and the plan that lets the node's workers go is written meanwhile."""
    kube, cluster = FakeKube(), a_running_job()
    stored(kube, cluster)
    app = an_app(kube, cluster, workers=1)
    other = job_body()
    other["metadata"] |= {"name": OTHER.name, "uid": "other"}
    kube.objects["heterotrainjobs", "ns", OTHER.name] = other
    busy, act = asyncio.Event(), app.actor.act

    async def hangs(job: JobView, decision: Decision, memory: JobMemory) -> float | None:
        if job.key == OTHER:
            busy.set()
            await asyncio.Event().wait()
        return await act(job, decision, memory)

    monkeypatch.setattr(app.actor, "act", hangs)
    running = asyncio.create_task(app.run())
    try:
        async with asyncio.timeout(WAIT_S):
            await busy.wait()
        node = next(iter(cluster.pods.values()))["spec"]["nodeName"]
        body = cluster.nodes[node] | {"spec": {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}}
        body["metadata"] = {**body["metadata"], "resourceVersion": "99"}
        app.events.node(body, deleted=False)
        plan_key = ("configmaps", "ns", keys.plan_name("job"))
        await until(lambda: json.loads(kube.objects[plan_key]["data"][keys.PLAN_KEY]).get("drain"), "the plan")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_new_leader_answers_first_what_nobody_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec of one of many jobs was changed while no replica led; no event tells which one."""
    kube, order = FakeKube(), list[str]()
    for number in range(40):
        body = job_body(generation=2)
        body["metadata"] |= {"name": f"job-{number}", "uid": f"uid-{number}", "generation": 2}
        body["status"] = {"observedGeneration": 1 if number == 25 else 2}
        kube.objects["heterotrainjobs", "ns", f"job-{number}"] = body
    app = an_app(kube, FakeCluster(), workers=1)
    handle = app.reconciler.handle

    async def noted(key: JobKey) -> str:
        order.append(key.name)
        return await handle(key)

    monkeypatch.setattr(app.reconciler, "handle", noted)
    running = asyncio.create_task(app.run())
    try:
        await until(lambda: len(order) >= 40, "a pass over each job")
        assert "job-25" in order[:2], "it waits for one pass at most"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
