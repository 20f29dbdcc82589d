"""A worker whose containers are not created: the kubelet's events name the cause, and the status shows it."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.start_problems import EVERY_S, PATIENCE_S
from heterotrain_operator.kube.errors import Rejected
from support.fake_cluster import NOW_S, FakeCluster
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, deliver_pods_and_plan, failing


class Time:
    """Both clocks of an operator, which tests move."""

    def __init__(self) -> None:
        self.s = NOW_S

    def clocks(self) -> Clocks:
        return Clocks(wall=lambda: self.s, monotonic=lambda: self.s)


def event(pod_uid: str, reason: str, message: str, *, at_s: float, kind: str = "Warning") -> dict[str, Any]:
    return {
        "metadata": {"name": f"{pod_uid}.{reason}.{at_s}", "namespace": "ns"}, "involvedObject": {"uid": pod_uid},
        "type": kind, "reason": reason, "message": message, "lastTimestamp": rfc3339(at_s),
    }  # fmt: skip


def starting(kube: FakeKube, time: Time) -> tuple[App, FakeCluster]:
    """Return an operator and a job whose workers have nodes, and no containers."""
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.settle()
    cluster.schedule()
    app = an_app(kube, cluster, time.clocks())
    deliver_pods_and_plan(app, kube, cluster)
    return app, cluster


def running_message(kube: FakeKube) -> str:
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    return next(str(c["message"]) for c in status["conditions"] if c["type"] == "Running")


def lists(kube: FakeKube) -> int:
    return sum(call[:2] == ("list", "events") for call in kube.calls)


async def test_a_missing_volume_is_named_with_the_next_step() -> None:
    kube, time = FakeKube(), Time()
    app, cluster = starting(kube, time)
    again_s = await app.reconciler.run_once(KEY)
    assert lists(kube) == 0, "containers get some time first"
    assert again_s is not None
    assert again_s <= PATIENCE_S
    uid = cluster.pods["job-w0"]["metadata"]["uid"]
    for each in (
        event(uid, "FailedMount", 'configmap "old" not found', at_s=NOW_S + 1),
        event(uid, "FailedMount", 'configmap "settings" not found', at_s=NOW_S + 9),
        event(uid, "Unhealthy", "Readiness probe failed", at_s=NOW_S + 10),
        event(uid, "FailedScheduling", "0/5 nodes: persistentvolumeclaim not found", at_s=NOW_S + 9),
        event(uid, "Pulled", "image pulled", at_s=NOW_S + 11, kind="Normal"),
        event("another-pod", "FailedMount", "of another pod", at_s=NOW_S + 12),
    ):
        kube.objects["events", "ns", each["metadata"]["name"]] = each
    time.s += PATIENCE_S + 1
    await app.reconciler.run_once(KEY)
    assert 'job-w0: FailedMount: configmap "settings" not found: create the Secret' in running_message(kube)
    for _ in range(5):
        await app.reconciler.run_once(KEY)
    assert lists(kube) == 1, "one request in a while, however often the job is looked at"
    kube.objects = {key: body for key, body in kube.objects.items() if key[0] != "events"}
    time.s += EVERY_S + 1
    await app.reconciler.run_once(KEY)
    assert "FailedMount" not in running_message(kube), "a cause that is gone is not repeated"


async def test_an_urgent_pass_leaves_the_events_to_the_next_pass() -> None:
    kube, time = FakeKube(), Time()
    app, _ = starting(kube, time)
    time.s += PATIENCE_S
    app.queue.add_urgent(KEY)
    assert await app.reconciler.handle(await app.queue.get_urgent()) == "ok"
    assert lists(kube) == 0
    assert await app.reconciler.handle(await app.queue.get()) == "ok", "it comes at once"
    assert lists(kube) == 1


async def test_a_role_that_may_not_list_events_changes_nothing() -> None:
    kube, time = FakeKube(), Time()
    app, _ = starting(kube, time)
    kube.fail = failing("list", "events", Rejected("events is forbidden", status_code=403))
    time.s += PATIENCE_S + 1
    assert await app.reconciler.run_once(KEY) is not None
    assert "see `kubectl describe pod job-w0`" in running_message(kube)


@pytest.mark.parametrize("message", ["x" * 100_000, "\x00\n\u202e"])
async def test_odd_words_fit_the_status(message: str) -> None:
    kube, time = FakeKube(), Time()
    app, cluster = starting(kube, time)
    each = event(cluster.pods["job-w0"]["metadata"]["uid"], "FailedMount", message, at_s=NOW_S)
    kube.objects["events", "ns", "e"] = each
    time.s += PATIENCE_S + 1
    await app.reconciler.run_once(KEY)
    assert len(running_message(kube)) < 1000
