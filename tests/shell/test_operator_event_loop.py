"""What the event loop does in one piece, counted: nothing that grows with the cluster, and no models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state import parse
from heterotrain_operator.cluster_state.node_changes import NodeChanges
from heterotrain_operator.cluster_state.store import PodKind, Sequence, Store
from heterotrain_operator.decide.plan import shares
from heterotrain_operator.engine import responsiveness, resync
from heterotrain_operator.engine.app import CLOCKS
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.resync import relist
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.resources import PODS
from heterotrain_operator.prom.vector import Vector, parse_answer
from heterotrain_operator.threads import COMPUTING, Threads
from lab.scale.exporters import SCRAPE_S, StandIn
from lab.scale.workload import Size
from support.api_stub import ApiStub, serve
from support.executors import AtOnce
from support.fake_cluster import NOW_S
from support.load import LoadTest, bodies_of

JOBS = 6


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Run without logs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


async def filled_cluster(clocks: Clocks = CLOCKS, threads: Threads | None = None) -> LoadTest:
    """Return a cluster that jobs have filled."""
    load = LoadTest(Size(jobs=JOBS, pods=10 * JOBS), clocks=clocks, threads=threads)
    await load.settle()
    return load


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> Counter[str]:
    """Count the calls of these functions of a module."""
    counts: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return counting

    for name in names:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


async def test_a_full_list_parses_only_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = await filled_cluster()
    counts = count_calls(monkeypatch, resync, "parse_job", "parse_pod", "parse_plan_object")
    links = count_calls(monkeypatch, PodKind, "_link")
    await relist(load.kube, load.app.store)
    assert not counts
    assert not links
    pod = next(body for (plural, _, _), body in load.kube.objects.items() if plural == "pods")
    pod["metadata"]["resourceVersion"] = "1000000"
    await relist(load.kube, load.app.store)
    assert counts == {"parse_pod": 1}
    assert links["_link"] == 1
    pods, version = load.app.store.pods, pod["metadata"]["resourceVersion"]
    assert version in {pod.resource_version for pod in pods.all().values()}


async def test_long_lists_and_preparations_hand_the_loop_over(monkeypatch: pytest.MonkeyPatch) -> None:
    load = await filled_cluster()
    monkeypatch.setattr(responsiveness, "PIECE_S", 0.0)
    for work, least in ((relist(load.kube, load.app.store), 10 * JOBS), (load.app.allocator._refresh_entries(), JOBS)):
        task, rounds = asyncio.create_task(work), 0
        while not task.done():
            await asyncio.sleep(0)
            rounds += 1
        assert rounds >= least


async def test_a_list_leaves_the_same_sums_as_an_empty_store() -> None:
    load = await filled_cluster()
    pods = load.app.store.pods
    views = list(pods.all().values())
    moved = [replace(view, node="elsewhere", resource_version="1000000") for view in views[::3]]
    ended = [replace(view, phase="Failed", resource_version="1000000") for view in views[1::3]]
    listed = [*moved, *ended]  # every third pod is gone
    pods.replace(listed, since=pods.begin_list())
    fresh = PodKind(Sequence(), NodeChanges())
    for view in listed:
        fresh.put(view)
    for key in {view.key for view in views}:
        assert pods.of_job(key) == fresh.of_job(key)
    assert pods.used == fresh.used


async def test_a_changed_status_does_not_check_the_spec_again(monkeypatch: pytest.MonkeyPatch) -> None:
    load = await filled_cluster()
    counts = count_calls(monkeypatch, parse, "read_spec")
    bodies = [json.loads(text) for plural, text in bodies_of(load) if plural == "heterotrainjobs"]
    for body in bodies:
        body["metadata"]["resourceVersion"] = "1000000"
        body["status"]["step"] = 7
        load.app.events.job(body, deleted=False)
    assert not counts
    assert {job.status.step for job in load.app.store.jobs.all().values()} == {7}
    body = bodies[0]
    body["metadata"] |= {"resourceVersion": "1000001", "generation": body["metadata"]["generation"] + 1}
    body["spec"]["suspend"] = True
    load.app.events.job(body, deleted=False)
    assert counts == {"read_spec": 1}
    job = load.app.store.jobs.get(parse.key_of(body))
    assert job is not None
    assert job.spec is not None
    assert job.spec.suspend


async def test_a_job_of_the_same_name_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    load = await filled_cluster()
    counts = count_calls(monkeypatch, parse, "read_spec")
    body = next(json.loads(text) for plural, text in bodies_of(load) if plural == "heterotrainjobs")
    body["metadata"] |= {"resourceVersion": "1000000", "uid": "another"}
    load.app.events.job(body, deleted=False)
    assert counts == {"read_spec": 1}


class Telemetry:
    """The stand-in for Prometheus, without HTTP."""

    def __init__(self, load: LoadTest, now_s: list[float]) -> None:
        self.stand_in = StandIn(lambda: NOW_S + now_s[0])
        for (plural, _, _), body in load.kube.objects.items():
            if plural == "configmaps":
                self.stand_in.take(body["data"][keys.PLAN_KEY])

    async def query(self, promql: str) -> Vector:
        return parse_answer(json.dumps(self.stand_in.answer(promql)).encode())


async def test_models_are_never_fitted_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """For news in a thread, and for members that change between two scrapes not at all."""
    now_s = [0.0]
    clocks = Clocks(lambda: now_s[0], lambda: NOW_S + now_s[0])
    executor = AtOnce()
    load = await filled_cluster(clocks, Threads(executor))
    app, prom = load.app, Telemetry(load, now_s)
    load.read_from(prom)
    in_threads: list[bool] = []

    def fitted(*args: Any, **kwargs: Any) -> Any:
        in_threads.append(executor.working)
        return fit_members(*args, **kwargs)

    fit_members = shares.fit_members
    monkeypatch.setattr(shares, "fit_members", fitted)
    jobs = list(app.store.jobs.all().values())
    for _ in range(3):
        now_s[0] += SCRAPE_S
        for job in jobs:
            await app.poller._read(job, prom, asyncio.Semaphore())
            await app.learner.learn_next()
            await app.reconciler.run_once(job.key)
    assert in_threads
    assert all(in_threads)
    in_threads.clear()
    versions = {key: plan.resource_version for key, plan in app.store.plans.all().items()}
    lost = next(pod for pod in app.store.pods.all().values() if len(app.store.pods.of_job(pod.key)) > 3 and pod.ready)
    app.store.pods.discard((lost.key.namespace, lost.name))
    del load.kube.objects["pods", lost.key.namespace, lost.name]
    await app.reconciler.run_once(lost.key)
    plan = app.store.plans.get(lost.key)
    assert plan is not None
    assert plan.resource_version != versions[lost.key], "the members have changed"
    assert not in_threads, "their speeds are known"


async def test_few_threads_compete_with_the_loop() -> None:
    threads, seen = Threads.few(), set[int]()
    barrier, name = threading.Barrier(COMPUTING), ContextVar[str]("name")
    name.set("this task's")

    def met() -> str:
        seen.add(threading.get_ident())
        barrier.wait(60)
        return name.get()

    found = await asyncio.gather(*(threads.run(met) for _ in range(3 * COMPUTING)))
    assert len(seen) == COMPUTING
    assert set(found) == {"this task's"}


@pytest.mark.looptime
async def test_the_first_pass_with_workers_waits_for_few_answers_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an answer each second: the dry run, two for each object, two batches of pods, and the status."""
    loop = asyncio.get_running_loop()
    load = LoadTest(Size(jobs=1, pods=10))

    def delayed(verb: str) -> Any:
        method = getattr(load.kube, verb)

        async def answering(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(1.0)
            return await method(*args, **kwargs)

        return answering

    for verb in ("get", "create", "replace", "apply", "merge", "delete"):
        monkeypatch.setattr(load.kube, verb, delayed(verb))
    load._watch()
    await load.app.allocator.run_once()
    began_s = loop.time()
    await load.app.reconciler.handle(await load.app.queue.get())
    created = [name for verb, plural, name in load.kube.calls if (verb, plural) == ("create", "pods")]
    assert len(created) >= 8  # the first batch
    assert loop.time() - began_s <= 6.1  # the answers


@pytest.mark.looptime
async def test_a_complete_view_waits_for_its_lists_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second for each of four lists: only plans come after another one, because they need their jobs."""
    loop = asyncio.get_running_loop()
    load = await filled_cluster()
    listed, store = load.kube.list, Store()

    async def slow(*args: Any, **kwargs: Any) -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(1.0)
        async for body in listed(*args, **kwargs):
            yield body

    monkeypatch.setattr(load.kube, "list", slow)
    began_s = loop.time()
    await relist(load.kube, store)
    assert loop.time() - began_s == pytest.approx(2.0, abs=0.1)
    known = load.app.store
    for found, expected in ((store.nodes, known.nodes), (store.jobs, known.jobs), (store.pods, known.pods)):
        assert found.all().keys() == expected.all().keys()
    assert store.plans.all().keys() == known.plans.all().keys() != set()


async def test_the_next_page_of_a_list_is_prepared_while_one_is_taken(tmp_path: Path) -> None:
    with serve(ApiStub(), tmp_path) as kubeconfig:
        kube = KubeClient(await load_configuration(str(kubeconfig)))
        asked: list[str] = []

        async def call(*_: Any, query: dict[str, str], timeout_s: float) -> dict[str, Any]:
            asked.append(query["continue"])
            await asyncio.sleep(0)
            number = int(query["continue"] or 0)
            return {"items": [{"number": number}], "metadata": {"continue": str(number + 1)} if number < 2 else {}}

        kube._call = call  # type: ignore[assignment,method-assign]  # pages without a server
        seen = []
        async for item in kube.list(PODS):
            await asyncio.sleep(0)
            seen.append((item["number"], len(asked)))
        assert seen == [(0, 2), (1, 3), (2, 3)]
        some = kube.list(PODS)
        await anext(some)
        await some.aclose()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "no request goes on for a list that nobody reads"
        await kube.close()
