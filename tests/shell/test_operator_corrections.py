"""Whole passes over a job whose spec was corrected: the API server gets other pods in the same pass."""

from __future__ import annotations

from typing import Any

from heterotrain_operator.cluster_state.parse import parse_job, parse_node
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.resync import relist
from heterotrain_operator.kube.errors import Rejected
from support.fake_cluster import Body, FakeCluster, pool
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, failing, without_competition

RUNNING = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [{"name": "main", "state": {"running": {}}}],
           "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip


def pods(kube: FakeKube) -> dict[str, Body]:
    return {name: body for (plural, _, name), body in kube.objects.items() if plural == "pods"}


def images(kube: FakeKube) -> list[str]:
    return sorted(body["spec"]["containers"][0]["image"] for body in pods(kube).values())


def edit(app: App, kube: FakeKube, image: str) -> None:
    """Change the image as ``kubectl apply`` does, and let the operator see it."""
    body = kube.objects["heterotrainjobs", "ns", "job"]
    body["spec"]["template"]["spec"]["containers"][0]["image"] = image
    body["metadata"] |= {"generation": 2, "resourceVersion": "900"}
    app.store.jobs.put(parse_job(body))


def set_status(app: App, kube: FakeKube, name: str, **status: Any) -> None:
    body = kube.objects["pods", "ns", name]
    body["spec"]["nodeName"] = "a1"
    body["status"] = status
    app.events.pod(body, deleted=False)


async def two_workers(kube: FakeKube) -> App:
    app = an_app(kube, FakeCluster(pool("a", maxReplicas=2)).with_nodes("a1", cpu="4"))
    await app.reconciler.run_once(KEY)
    assert len(pods(kube)) == 2
    return app


async def test_one_pass_after_a_correction_the_right_pods_exist() -> None:
    kube = FakeKube()
    app = await two_workers(kube)
    waiting = [{"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]
    for name in list(pods(kube)):
        set_status(app, kube, name, phase="Pending", containerStatuses=waiting)
    old = set(pods(kube))
    edit(app, kube, "right")
    await app.reconciler.run_once(KEY)
    assert images(kube) == ["right", "right"]
    assert old.isdisjoint(pods(kube))
    assert kube.objects["heterotrainjobs", "ns", "job"]["status"]["updatedReplicas"] == 2


async def test_a_correction_that_the_api_server_refuses_costs_no_pod() -> None:
    kube = FakeKube()
    app = await two_workers(kube)
    old = set(pods(kube))
    kube.fail = failing("dry-run", "pods", Rejected("no such field", status_code=422))
    edit(app, kube, "right")
    await app.reconciler.run_once(KEY)
    assert set(pods(kube)) == old


async def test_a_new_leader_makes_replacements_as_their_running_peers_are() -> None:
    kube = FakeKube()
    app = await two_workers(kube)
    set_status(app, kube, "job-w0", **RUNNING)
    await app.reconciler.run_once(KEY)
    edit(app, kube, "other")
    del kube.objects["pods", "ns", "job-w1"]
    leader = without_competition(kube, status_interval_s=0.0)
    await relist(kube, leader.store)
    for body in FakeCluster().with_nodes("a1", cpu="4").nodes.values():
        leader.store.nodes.put(parse_node(body))
    await leader.reconciler.run_once(KEY)
    assert images(kube) == ["image", "image"]
