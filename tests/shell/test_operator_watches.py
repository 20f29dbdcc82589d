"""What wakes jobs: events of watches, gaps between them, and the start of the operator."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import kopf
import pytest
from heterotrain_operator.cluster_state.parse import (
    RANKS_ANNOTATION,
    parse_job,
)
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.resync import relist
from heterotrain_operator.handlers import register
from heterotrain_operator.kube.errors import NotFound, Unavailable
from heterotrain_operator.settings import Settings
from support.executors import at_once
from support.fake_cluster import FakeCluster, job_body, node_body
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, failing, without_competition


async def test_an_unreadable_object_does_not_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = FakeKube()
    app = without_competition(kube, status_interval_s=0.0)
    for name in ("good", "unreadable"):
        body = job_body(name=name, uid=name)
        kube.objects["heterotrainjobs", "ns", name] = body
    del kube.objects["heterotrainjobs", "ns", "unreadable"]["metadata"]["uid"]
    assert await relist(kube, app.store) == {JobKey("ns", "good")}


def test_an_invalid_annotation_counts_as_one_rank() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c").start()
    for text in ("many", "-1", "0", "1" * 5000, ""):
        cluster.pods["job-w0"]["metadata"]["annotations"][RANKS_ANNOTATION] = text
        assert [pod.ranks for pod in cluster.pod_views] == [1, 1, 1]


async def test_heartbeats_of_nodes_queue_no_job_and_taints_queue_all() -> None:
    app = an_app(FakeKube())
    body = node_body("a", "a")
    body["metadata"]["resourceVersion"] = "7"
    app.events.node(body, deleted=False)
    assert len(app.queue) == 0
    tainted = node_body("a", "a", taints=["karpenter.sh/disrupted:NoSchedule"])
    tainted["metadata"]["resourceVersion"] = "8"
    app.events.node(tainted, deleted=False)
    assert len(app.queue) == 1


async def test_a_condition_that_announces_a_node_s_end_queues_all_jobs() -> None:
    app = an_app(FakeKube(), node_announcements="Maintenance, example.com/retiring")
    app.events.node(node_body("a", "a"), deleted=False)
    app.queue.forget(KEY)
    leaving = node_body("a", "a")
    leaving["metadata"]["resourceVersion"] = "8"
    leaving["status"]["conditions"].append({"type": "Maintenance", "status": "True"})
    app.events.node(leaving, deleted=False)
    assert len(app.queue) == 1


def test_views_are_frozen() -> None:
    job = parse_job(job_body())
    with pytest.raises(AttributeError):
        job.uid = "other"  # type: ignore[misc]  # frozen on purpose
    assert replace(job, uid="other").uid == "other"


@pytest.mark.parametrize("between", [("MODIFIED",), ()])
async def test_a_deletion_during_a_gap_of_the_watch_is_noticed_when_the_watch_lists_again(
    between: tuple[str, ...],
) -> None:
    kube = FakeKube()
    app = App(kube, Settings(leader_election=False, relist_s=3600.0), threads=at_once())
    for name in ("a", "b"):
        kube.objects["nodes", "", name] = node_body(name, name)
    running = asyncio.create_task(app.run())
    try:
        async with asyncio.timeout(30):
            await app._synced.wait()
            for event_type in (None, *between):
                app.gaps.note("nodes", event_type, "uid-b")
            del kube.objects["nodes", "", "a"]
            await asyncio.sleep(0)
            assert set(app.store.nodes.all()) == {"a", "b"}, "no event reports the deletion"
            app.gaps.note("nodes", None, "uid-b")
            while set(app.store.nodes.all()) != {"b"}:  # noqa: ASYNC110  # the store signals nothing
                await asyncio.sleep(0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_job_that_was_deleted_while_no_watch_reported_it_is_forgotten_when_a_write_finds_it_missing() -> None:
    kube = FakeKube()
    app = an_app(kube)
    del kube.objects["heterotrainjobs", "ns", "job"]
    kube.fail = failing("merge status", "heterotrainjobs", NotFound("job"))
    await app.reconciler.run_once(KEY)
    assert KEY not in app.store.jobs.all()


async def test_labels_of_nodes_wake_jobs_only_where_a_job_selects_by_them() -> None:
    app = an_app(FakeKube())
    node = node_body("a", "a")
    for label, woken in (("feature.node.kubernetes.io/cpu-model", 0), ("pool", 1)):
        node["metadata"]["labels"] = {**node["metadata"]["labels"], label: "new"}
        node["metadata"]["resourceVersion"] += "0"
        app.events.node(node, deleted=False)
        assert len(app.queue) == woken


async def test_nothing_is_watched_before_the_api_server_serves_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kopf looks the resources up once: a watch that starts before the definition exists never sees a job."""
    kube = FakeKube()
    answers = [NotFound("the server could not find the requested resource"), Unavailable("refused"), None]
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    kube.fail = lambda *_: answers.pop(0)
    monkeypatch.setattr("heterotrain_operator.engine.app.asyncio.sleep", pause)
    await App(kube, Settings(leader_election=False), threads=at_once()).wait_until_served()
    assert (answers, len(pauses)) == ([], 2)


async def test_the_operator_starts_only_after_the_api_server_serves_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def note(step: str) -> None:
        order.append(step)

    async def no_servers(**_: object) -> list[object]:
        return []

    app = App(FakeKube(), Settings(leader_election=False), threads=at_once())
    monkeypatch.setattr("heterotrain_operator.handlers.serve", no_servers)
    monkeypatch.setattr(app, "wait_until_served", lambda: note("served"))
    monkeypatch.setattr(app, "run", lambda: note("run"))
    registry = kopf.OperatorRegistry()
    stop = asyncio.Event()
    register(registry, app, stop=stop)
    (start,) = [each.fn for each in registry._activities.get_all_handlers() if "start" in str(each.id)]
    await start(settings=kopf.OperatorSettings())
    await stop.wait()
    assert order == ["served", "run"]


async def test_several_namespaces_are_listed_one_by_one_and_others_are_not() -> None:
    kube, store = FakeKube(), Store()
    for namespace in ("one", "two", "three"):
        body = job_body(name=namespace, namespace=namespace, uid=f"uid-{namespace}")
        kube.objects["heterotrainjobs", namespace, namespace] = body
    await relist(kube, store, ("one", "two"))
    assert {key.namespace for key in store.jobs.all()} == {"one", "two"}
    assert Settings(watch_namespaces=" one, two,,one ").watched == ("one", "two")
    assert Settings().watched == ()
