"""Dry runs of pods: when templates are checked, and what admission adds to them."""

from __future__ import annotations

import copy

import pytest
from heterotrain_operator.cluster_state.parse import (
    parse_node,
)
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.reconcile import RELEARN_S
from heterotrain_operator.engine.resync import relist
from heterotrain_operator.kube.errors import Rejected
from heterotrain_operator.kube.resources import PODS, Resource
from support.fake_cluster import FakeCluster, pool
from support.fakes import Body, FakeKube
from support.operator_app import KEY, an_app, failing, without_competition


async def test_a_template_is_checked_once_for_each_generation_of_the_spec() -> None:
    kube = FakeKube()
    app = an_app(kube)
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert [name for verb, _, name in kube.calls if verb == "dry-run"] == ["job-try-a", "job-try-b", "job-try-c"]


class AdmittingKube(FakeKube):
    """An API server whose LimitRange gives each container without a request two cores, and pods a priority."""

    async def create(self, resource: Resource, body: Body, *, dry_run: bool = False) -> Body:
        if resource == PODS:
            body = copy.deepcopy(body)
            body["spec"]["priority"] = 7
            for container in body["spec"]["containers"]:
                container["resources"].setdefault("requests", {}).setdefault("cpu", "2")
        return await super().create(resource, body, dry_run=dry_run)


async def test_capacity_counts_with_what_admission_adds_to_a_pod() -> None:
    kube = AdmittingKube()
    app = an_app(kube, FakeCluster(pool("a", maxReplicas=8, resources={})).with_nodes("a", cpu="6"))
    for _ in range(2):
        await app.reconciler.run_once(KEY)
    workers = [body for (plural, _, _), body in kube.objects.items() if plural == "pods"]
    assert len(workers) == 3, "so many fit on six cores"
    job = app.store.jobs.get(KEY)
    assert isinstance(job, ValidJob)
    shapes = app.allocator._new_entry(job).shapes
    assert shapes["a"].requests["cpu"] == 2.0, "the allocation counts the same"
    assert {pod.priority for pod in app.store.pods.of_job(KEY)} == {7}


async def test_a_new_leader_learns_what_admission_adds_without_haste() -> None:
    kube, now_s = AdmittingKube(), 0.0
    clocks = Clocks(monotonic=lambda: now_s)
    cluster = FakeCluster(pool("a", maxReplicas=8, resources={})).with_nodes("a", cpu="6")
    await an_app(kube, cluster, clocks).reconciler.run_once(KEY)
    kube.calls.clear()
    app = without_competition(kube, status_interval_s=0.0, clocks=clocks)
    for body in cluster.nodes.values():
        app.store.nodes.put(parse_node(body))
    await relist(kube, app.store)
    dry_runs = lambda: sum(call[0] == "dry-run" for call in kube.calls)  # noqa: E731  # a short count
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert dry_runs() == 0, "the job was accepted before"
    now_s = RELEARN_S
    app.queue.add_urgent(KEY)
    await app.reconciler.handle(await app.queue.get_urgent())
    assert dry_runs() == 0, "an urgent pass does not wait for it"
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert dry_runs() == 1
    job = app.store.jobs.get(KEY)
    assert job is not None
    assert app.reconciler._sources.admitted.of(job)["a"].shape.requests["cpu"] == 2.0


async def test_a_refused_template_is_checked_again_later_because_a_policy_may_change() -> None:
    kube = FakeKube()
    app = an_app(kube)
    kube.fail = failing("dry-run", "pods", Rejected("violates PodSecurity", status_code=403))
    again_s = await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    assert status["state"] == "Invalid"
    assert "violates PodSecurity" in status["reason"]
    assert again_s == pytest.approx(20.0, abs=1.0)


async def test_an_invalid_template_is_checked_less_and_less_often() -> None:
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, clocks=Clocks(monotonic=lambda: now_s))
    kube.fail = failing("dry-run", "pods", Rejected("unknown field", status_code=400))
    waits_s = []
    for _ in range(7):
        again_s = await app.reconciler.run_once(KEY)
        assert again_s is not None
        waits_s.append(again_s)
        now_s += again_s
    assert waits_s == [20.0, 40.0, 80.0, 160.0, 320.0, 320.0, 320.0]
