"""What a job costs the operator among many others, counted and not timed: a cost that grows with the number of jobs fails here."""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import structlog
from heterotrain_operator.engine.app import App
from heterotrain_operator.settings import Settings
from lab.scale.workload import Size
from support.fakes import FakeKube
from support.load import LoadTest, bodies_of, feed

TraceFunction = Callable[[FrameType, str, Any], Any]
FEW, MANY = 20, 60
PODS_PER_JOB = 10
MOST_REQUESTS_PER_JOB = 20 + 2 * PODS_PER_JOB
"""Each worker is created and told its plan once; the rest is Service, budget, plans, dry runs, status and Events."""
MOST_PASSES_PER_JOB = 10
MOST_LINES_PER_JOB_AGAIN = 21_000
MOST_BYTES_PER_JOB = 110_000


@pytest.fixture(autouse=True)
def here_and_silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in one thread, where calls can be counted, and say nothing."""

    async def at_once(call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


async def a_crowd(jobs: int) -> LoadTest:
    """Return jobs that have filled a cluster."""
    load = LoadTest(Size(jobs=jobs, pods=jobs * PODS_PER_JOB))
    await load.settle()
    return load


async def lines_of_passes(load: LoadTest) -> float:
    """Return how many lines of Python it takes, for each job, to look at every job once more."""
    load.kube.calls.clear()
    load.app.queue.add_low_priority(load.app.store.jobs.all())
    with counted() as lines:
        while len(load.app.queue):
            await load.app.reconciler.handle(await load.app.queue.get())
    return lines[0] / len(load.app.store.jobs.all())


async def lines_of_allocation(load: LoadTest) -> float:
    """Return how many lines of Python one allocation takes, for each job."""
    with counted() as lines:
        await load.app.allocator.run_once()
    return lines[0] / len(load.app.store.jobs.all())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the lines that are run (each round of a loop anew) and the functions that are called and left."""
    count = [0]

    def trace(_frame: FrameType, _event: str, _argument: object) -> TraceFunction:
        count[0] += 1
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


async def test_costs_of_a_job_stay_the_same_among_three_times_as_many() -> None:
    few, many = await a_crowd(FEW), await a_crowd(MANY)
    for load, jobs in ((few, FEW), (many, MANY)):
        assert sum(load.ready.values()) >= jobs * PODS_PER_JOB * 0.99, "the cluster is full"
        by_kind = Counter(f"{verb} {plural}" for verb, plural, _ in load.kube.calls)
        assert len(load.kube.calls) / jobs <= MOST_REQUESTS_PER_JOB, by_kind
        assert load.passes / jobs <= MOST_PASSES_PER_JOB
    one, other = await lines_of_passes(few), await lines_of_passes(many)
    assert few.kube.calls == many.kube.calls == [], "looking again where nothing changed asks nothing of the API server"
    assert other <= MOST_LINES_PER_JOB_AGAIN
    assert other <= 1.02 * one
    assert await lines_of_allocation(many) <= 1.15 * await lines_of_allocation(few)


async def test_an_echo_of_what_is_known_costs_no_pass() -> None:
    load = await a_crowd(FEW)
    feed(load.app, [each for each in bodies_of(load) if each[0] in ("pods", "configmaps", "nodes")])
    assert len(load.app.queue) == 0


async def test_what_is_kept_of_a_job_with_its_pods_is_small() -> None:
    bodies = bodies_of(await a_crowd(FEW))
    app = App(FakeKube(), Settings(leader_election=False))
    tracemalloc.start()
    feed(app, bodies)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(app.store.pods.all()) >= FEW * PODS_PER_JOB
    assert kept / FEW <= MOST_BYTES_PER_JOB


async def test_a_node_that_goes_is_first_of_all_the_matter_of_those_who_stand_on_it() -> None:
    load = await a_crowd(FEW)
    pods = load.app.store.pods.all().values()
    node = load.kube.objects["nodes", "", next(pod.node for pod in pods if pod.node)]
    concerned = {pod.key for pod in pods if pod.node == node["metadata"]["name"]}
    gone = {**node, "metadata": {**node["metadata"], "resourceVersion": "2"}, "spec": {"unschedulable": True}}
    load.app.node_event(gone, deleted=False)
    order = [await load.app.queue.get() for _ in range(len(load.app.queue))]
    assert len(order) == FEW
    assert concerned <= set(order[: len(concerned) + len(concerned) // 4 + 1]), "every fifth may be another one"


async def test_a_new_operator_changes_nothing_before_it_has_decided_between_the_jobs() -> None:
    load = await a_crowd(FEW)
    load.kube.calls.clear()
    load.app = App(load.kube, load.app.settings)
    feed(load.app, bodies_of(load))
    while len(load.app.queue):
        await load.app.reconciler.handle(await load.app.queue.get())
    repaired = {("apply", "services"), ("apply", "poddisruptionbudgets")}
    assert {(verb, plural) for verb, plural, _ in load.kube.calls} == repaired
    await load.app.allocator.run_once()
    load.kube.calls.clear()
    while len(load.app.queue):
        await load.app.reconciler.handle(await load.app.queue.get())
    said_anew = {("apply status", "heterotrainjobs")}
    assert {(verb, plural) for verb, plural, _ in load.kube.calls} <= said_anew, "it decides the same"
