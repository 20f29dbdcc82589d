"""What the operator writes to pods of a group in Kueue, with a fake API server."""

from __future__ import annotations

from heterotrain_operator.decide.plugins.kueue.plugin import FINALIZER, GROUP, RETRIABLE, SERVING
from heterotrain_operator.engine.app import App
from support.fake_cluster import FakeCluster, a_running_job
from support.fakes import FakeKube
from support.operator_app import KEY, an_app

OTHER = "example.com/other"


def in_a_group(cluster: FakeCluster) -> tuple[App, FakeKube]:
    """Return an operator that has listed a cluster whose pods are a group in Kueue."""
    kube = FakeKube()
    app = an_app(kube, cluster)
    for body in cluster.pods.values():
        metadata = body["metadata"]
        metadata["labels"][GROUP] = "mine"
        metadata["annotations"][SERVING] = "true"
        metadata["finalizers"] = [OTHER, FINALIZER]
        kube.objects["pods", "ns", metadata["name"]] = body
        app.events.pod(body, deleted=False)
    return app, kube


def finalizers(kube: FakeKube) -> dict[str, list[str]]:
    return {name: body["metadata"]["finalizers"] for (kind, _, name), body in kube.objects.items() if kind == "pods"}


async def test_the_pods_of_a_deleted_job_lose_kueues_finalizer_once_they_have_ended() -> None:
    cluster = a_running_job()
    for name in ("job-w0", "job-w1"):
        cluster.pods[name]["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    cluster.pods["job-w0"]["status"]["phase"] = "Succeeded"
    app, kube = in_a_group(cluster)
    app.store.jobs.discard(KEY)
    assert await app.reconciler.run_once(KEY) is None
    held = [OTHER, FINALIZER]
    assert finalizers(kube) == {"job-w0": [OTHER], "job-w1": held, "job-w2": held}, "one runs, and one is not deleted"


async def test_a_pod_that_is_gone_by_then_is_no_error() -> None:
    cluster = a_running_job()
    cluster.pods["job-w0"]["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    cluster.pods["job-w0"]["status"]["phase"] = "Failed"
    app, kube = in_a_group(cluster)
    app.store.jobs.discard(KEY)
    del kube.objects["pods", "ns", "job-w0"]
    assert await app.reconciler.run_once(KEY) is None


async def test_pods_that_stay_after_the_end_of_their_job_end_their_group() -> None:
    cluster = a_running_job()
    cluster.edit(lambda spec: spec.update(cleanPodPolicy="None"))
    ended = {"type": "Succeeded", "status": "True", "reason": "Completed", "message": ""}
    ended["lastTransitionTime"] = "2027-01-15T08:00:00Z"
    cluster.job["status"]["conditions"] = [ended]
    app, kube = in_a_group(cluster)
    await app.reconciler.run_once(KEY)
    for name in cluster.pods:
        annotations = kube.objects["pods", "ns", name]["metadata"]["annotations"]
        assert annotations[RETRIABLE] == "false"
        assert SERVING not in annotations, "success counts again"
