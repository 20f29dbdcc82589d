"""Passes over jobs with a fake API server: the order of writes, and recovery after a crash."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_operator.cluster_state.parse import (
    rfc3339,
)
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.resync import relist
from heterotrain_operator.kube.errors import KubeError, NotFound, Rejected
from support.fake_cluster import NOW_S, FakeCluster, a_running_job, node_body, pool
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, without_competition


async def test_objects_that_pods_need_are_written_before_them_and_the_status_after_them() -> None:
    kube = FakeKube()
    await an_app(kube, network_policy=True).reconciler.run_once(KEY)
    assert [(verb, plural) for verb, plural, _ in kube.writes] == [
        ("apply", "networkpolicies"),
        ("create", "configmaps"),
        ("create", "secrets"),
        ("create", "pods"),
        ("create", "pods"),
        ("create", "pods"),
        ("merge status", "heterotrainjobs"),
    ]


async def test_the_operator_s_own_writes_count_before_their_watch_events() -> None:
    """The API's answers are stored: the second pass only counts the new pods, and the third one does nothing."""
    kube = FakeKube()
    app = an_app(kube)
    await app.reconciler.run_once(KEY)
    kube.calls.clear()
    await app.reconciler.run_once(KEY)
    assert [call[0] for call in kube.writes] == ["merge status"]
    await app.reconciler.run_once(KEY)
    assert len(kube.writes) == 1


@pytest.mark.parametrize("crash_after", range(8))
async def test_the_next_operator_recovers_from_a_crash_after_any_write(crash_after: int) -> None:
    kube = FakeKube()

    class Crash(BaseException):
        pass

    def fail(*_: str) -> None:
        if len(kube.writes) > crash_after:
            raise Crash

    kube.fail = fail
    with pytest.raises(Crash) if crash_after < 7 else nullcontext():
        await an_app(kube, network_policy=True).reconciler.run_once(KEY)
    kube.fail = lambda *_: None
    successor = without_competition(kube, status_interval_s=0.0)
    for name in ("a", "b", "c"):
        kube.objects["nodes", "", name] = node_body(name, name)
    for _ in range(3):
        await relist(kube, successor.store)
        await successor.reconciler.run_once(KEY)
    assert sorted(name for plural, _, name in kube.objects if plural == "pods") == ["job-w0", "job-w1", "job-w2"]
    assert ("configmaps", "ns", "job-plan") in kube.objects


async def test_the_status_counts_a_failed_worker_before_its_pod_is_removed() -> None:
    cluster = FakeCluster(spec={"cleanPodPolicy": "All", "backoffLimit": 0}).with_nodes("a", "b", "c").start()
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="boom")
    kube = FakeKube()
    app = an_app(kube, cluster)
    for body in cluster.pods.values():
        kube.objects["pods", "ns", body["metadata"]["name"]] = body
        app.events.pod(body, deleted=False)
    assert cluster.plan is not None
    app.events.plan(cluster.plan, deleted=False)
    await app.reconciler.run_once(KEY)
    order = [call[0] for call in kube.writes]
    assert order.index("merge status") < order.index("delete")
    assert kube.objects["heterotrainjobs", "ns", "job"]["status"]["restarts"] == 1


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_checkpoint_of_a_pod_that_ends_and_is_deleted_between_two_passes_is_in_the_status(
    at_once: bool,
) -> None:
    """The kubelet reports the end and deletes the pod a moment later; a foreign pod's words count for nothing."""
    kube, cluster = FakeKube(), a_running_job()
    cluster.edit(lambda spec: spec.update(suspend=True))
    app = an_app(kube, cluster, Clocks(lambda: 0.0, lambda: NOW_S))
    for body in cluster.pods.values():
        app.events.pod(body, deleted=False)
    cluster.end("job-w0", Ending.LEFT, told=True, saved=(7, NOW_S - 1)).end("job-w1", Ending.LEFT, told=True)
    cluster.end("job-w2", Ending.LEFT, told=True, saved=(9, NOW_S))
    cluster.pods["job-w2"]["metadata"]["ownerReferences"][0]["uid"] = "another"
    for version, body in enumerate(cluster.pods.values()):
        body["metadata"]["resourceVersion"] = str(10_000 + version)
        if not at_once:
            app.events.pod(body, deleted=False)
        app.events.pod(body, deleted=True)
    assert app.store.pods.of_job(KEY) == ()
    await app.reconciler.run_once(KEY)
    saved = {"step": 7, "time": rfc3339(NOW_S - 1)}
    assert kube.objects["heterotrainjobs", "ns", "job"]["status"]["lastCheckpoint"] == saved


async def test_a_job_deleted_during_its_pass_is_not_an_error() -> None:
    kube = FakeKube()
    app = an_app(kube)

    def gone(verb: str, plural: str, _: str) -> KubeError | None:
        if (verb, plural) == ("merge status", "heterotrainjobs"):
            app.store.jobs.discard(KEY)
            return NotFound("job")
        return None

    kube.fail = gone
    assert await app.reconciler.run_once(KEY) is None


async def test_nothing_is_done_for_a_missing_job() -> None:
    kube = FakeKube()
    app = an_app(kube)
    app.store.jobs.discard(KEY)
    assert await app.reconciler.run_once(KEY) is None
    assert kube.calls == []


@pytest.mark.parametrize("crash_after", range(8))
async def test_a_worker_lost_with_its_pod_is_counted_once_whenever_the_operator_dies(crash_after: int) -> None:
    """The plan is written first. It names the members that it lost until the status counts them."""
    kube, cluster = FakeKube(), a_running_job()
    cluster.vanish("job-w2")
    for kind, bodies in (
        ("pods", cluster.pods.values()),
        ("nodes", cluster.nodes.values()),
        ("configmaps", [cluster.plan]),
    ):
        for body in bodies:
            assert body is not None
            kube.objects[kind, body["metadata"].get("namespace", ""), body["metadata"]["name"]] = body
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job

    class Crash(BaseException):
        pass

    def fail(*_: str) -> None:
        if len(kube.writes) > crash_after:
            raise Crash

    for each in (fail, lambda *_: None):
        kube.fail = each
        app = without_competition(kube, status_interval_s=0.0)
        with suppress(Crash):
            for _ in range(3):
                await relist(kube, app.store)
                await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert [pool["disruptions"] for pool in status["pools"]] == [0, 0, 1]


async def test_the_event_names_only_workers_that_were_created() -> None:
    """The quota takes one of three."""
    kube = FakeKube()
    app = an_app(kube)
    kube.fail = lambda verb, plural, name: (
        Rejected("exceeded quota", status_code=403)
        if (verb, plural) == ("create", "pods") and name != "job-w0"
        else None
    )
    await app.reconciler.run_once(KEY)
    await app.publisher.flush()
    events = [body for (plural, _, _), body in kube.objects.items() if plural == "events"]
    assert [each["message"] for each in events if each["reason"] == "WorkersCreated"] == ["created job-w0"]


async def test_layouts_are_planned_outside_the_pass_and_the_job_is_queued_again() -> None:
    """The first pass writes generation 0; the planner's answer queues the job, and the next pass names members."""
    cluster = FakeCluster(
        pool("a"), pool("b"), spec={"parallelism": {"mode": "Pipeline"}, "elasticPolicy": {"minReplicas": 1}}
    )
    cluster.with_nodes("a", "b").start()
    assert cluster.plan_json["generation"] == 0
    kube = FakeKube()
    app = an_app(kube, cluster)
    points = (UnitSeconds(micro_batch_samples=1, forward_s=0.01, backward_s=0.02),)
    profiles = {
        name: PoolProfile(
            memory_bytes=900,
            units=(
                UnitProfile(
                    name="unit", parameter_bytes=100, activation_bytes=1, boundary_bytes=1, seconds={name: points}
                ),
            )
            * 3,
        )
        for name in "ab"
    }
    app.reconciler._sources = replace(
        app.reconciler._sources, telemetry_of=lambda _: Telemetry(profiles=profiles, sequence=1)
    )
    for view in cluster.pod_views:
        app.store.pods.put(view)
        kube.objects["pods", "ns", view.name] = cluster.pods[view.name]
    assert cluster.plan is not None
    kube.objects["configmaps", "ns", "job-plan"] = cluster.plan
    plan = cluster.plan_view
    assert plan is not None
    app.store.plans.put(plan)
    await app.reconciler.run_once(KEY)
    assert json.loads(kube.objects["configmaps", "ns", "job-plan"]["data"][keys.PLAN_KEY])["generation"] == 0
    assert await app.queue.get() == KEY
    await app.reconciler.run_once(KEY)
    found = json.loads(kube.objects["configmaps", "ns", "job-plan"]["data"][keys.PLAN_KEY])
    assert found["generation"] == 1
    assert len(found["members"]) == 1
    assert len(found["ranks"]) == 2
