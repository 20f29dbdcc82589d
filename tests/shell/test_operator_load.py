"""The operator's cost per job, counted instead of timed: a cost that grows with the number of jobs fails here."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import structlog
from heterotrain_operator.cluster_state.store import ObjectTable
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.status.events import JobEvent
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.publisher import MOST_WAITING
from heterotrain_operator.engine.queue import FAIR_EVERY
from lab.scale.workload import Size
from support.executors import at_once
from support.load import LoadTest, bodies_of, feed

FEW, MANY = 10, 30
PODS_PER_JOB = 10
MOST_REQUESTS_PER_JOB = 23 + 2 * PODS_PER_JOB
"""Each worker is created once and gets its plan once; the rest is Service and budget
(whose owner is read before each write), plans, dry runs, status, Events."""
MOST_PASSES_PER_JOB = 10
TAINTED = {"taints": [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]}
DECISION, ALLOCATION = "heterotrain_operator.decide", "heterotrain_planner.allocate"


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Run without logs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


async def filled_cluster(jobs: int) -> LoadTest:
    """Return a cluster that this many jobs have filled."""
    load = LoadTest(Size(jobs=jobs, pods=jobs * PODS_PER_JOB))
    await load.settle()
    return load


class CountedMapping(Mapping[Any, Any]):
    """A mapping that counts the entries over which its users iterate."""

    def __init__(self, entries: Mapping[Any, Any], counts: Counter[str]) -> None:
        self._entries = entries
        self._counts = counts

    def __getitem__(self, key: Any) -> Any:
        return self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        for key in self._entries:
            self._counts["reads"] += 1
            yield key


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count Python calls inside the decision and the allocation, and iterations over the store's objects."""
    counts: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            for part in (DECISION, ALLOCATION):
                counts[part] += module.startswith(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectTable, "all", lambda kind: CountedMapping(kind._views, counts))
        sys.setprofile(profile)
        try:
            yield counts
        finally:
            sys.setprofile(None)


async def cost_of_passes(load: LoadTest) -> Counter[str]:
    """Return the counts of one more pass over every job."""
    load.kube.calls.clear()
    load.app.queue.add_low_priority(load.app.store.jobs.all())
    with counted() as counts:
        while len(load.app.queue):
            counts["passes"] += 1
            await load.app.reconciler.handle(await load.app.queue.get())
    return counts


async def cost_of_allocation(load: LoadTest) -> Counter[str]:
    """Return the counts of one allocation."""
    with counted() as counts:
        await load.app.allocator.run_once()
    return counts


@pytest.mark.heavy
async def test_the_cost_of_a_job_stays_the_same_among_three_times_as_many() -> None:
    few, many = await filled_cluster(FEW), await filled_cluster(MANY)
    for load, jobs in ((few, FEW), (many, MANY)):
        assert sum(load.ready.values()) >= jobs * PODS_PER_JOB * 0.99, "the cluster is full"
        by_kind = Counter(f"{verb} {plural}" for verb, plural, _ in load.kube.calls)
        assert len(load.kube.calls) / jobs <= MOST_REQUESTS_PER_JOB, by_kind
        assert load.passes / jobs <= MOST_PASSES_PER_JOB
    assert many.passes / MANY <= 1.1 * few.passes / FEW
    assert len(many.kube.calls) / MANY <= 1.1 * len(few.kube.calls) / FEW
    passes_few, passes_many = await cost_of_passes(few), await cost_of_passes(many)
    assert few.kube.calls == many.kube.calls == [], "a pass without changes sends no request"
    for counts, jobs in ((passes_few, FEW), (passes_many, MANY)):
        assert counts["passes"] == jobs, "one pass over each job"
        assert counts["reads"] == 0, "a pass looks objects up; it does not iterate over all objects of a kind"
        assert counts[DECISION] > 10 * jobs, "calls are counted"
    assert passes_many[DECISION] / MANY <= 1.02 * passes_few[DECISION] / FEW
    allocation_few, allocation_many = await cost_of_allocation(few), await cost_of_allocation(many)
    for part in (DECISION, ALLOCATION):
        assert allocation_few[part] > 10 * FEW, "calls are counted"
        assert allocation_many[part] / MANY <= 1.02 * allocation_few[part] / FEW, part


@pytest.mark.heavy
@pytest.mark.parametrize("unschedulable", [False, True])
async def test_the_cost_of_a_job_stays_the_same_among_four_times_the_nodes(*, unschedulable: bool) -> None:
    counts = []
    for more_nodes in (0, 3 * sum(Size(jobs=FEW, pods=FEW * PODS_PER_JOB).nodes.values())):
        size = Size(jobs=FEW, pods=FEW * PODS_PER_JOB)
        load = LoadTest(size, more_nodes=more_nodes, unschedulable=unschedulable)
        await load.settle()
        pods = load.app.store.pods.all().values()
        assert any(pod.unschedulable for pod in pods) is unschedulable
        load.app.store.pods.put(replace(next(iter(pods)), resource_version="1000000"))  # a change on one node
        counts.append(await cost_of_passes(load))
        assert counts[-1]["reads"] == 0
    assert counts[1][DECISION] <= 1.02 * counts[0][DECISION]


async def test_an_echo_of_a_known_state_costs_no_pass() -> None:
    load = await filled_cluster(FEW)
    feed(load.app, [each for each in bodies_of(load) if each[0] in ("pods", "configmaps", "nodes")])
    assert len(load.app.queue) == 0


async def test_the_echo_of_new_numbers_in_a_status_costs_no_pass() -> None:
    """The echo of another status does: the next step may have waited for what was written."""
    load = await filled_cluster(FEW)
    key, job = next(iter(load.app.store.jobs.all().items()))
    memory = load.app.reconciler._memory_of(job)
    for change, passes in (({"samples": 1234}, 0), ({"restarts": job.status.restarts + 1}, 1)):
        job = load.app.store.jobs.all()[key]
        await load.app.statuses.write(job, job.status.model_copy(update=change), memory)
        load._watch()
        assert len(load.app.queue) == passes


async def test_the_echo_of_new_numbers_causes_a_pass_where_something_else_was_done() -> None:
    load = await filled_cluster(1)
    ((key, job),) = load.app.store.jobs.all().items()
    decision = Decision(
        status=job.status.model_copy(update={"samples": 1234}),
        touch=load.app.store.pods.of_job(key)[:1],
        plan_version="9.9",
    )
    await load.app.actor.act(job, decision, load.app.reconciler._memory_of(job))
    load._watch()
    assert len(load.app.queue) == 1


async def test_a_lost_node_queues_the_jobs_on_it_before_all_others() -> None:
    load = await filled_cluster(FEW)
    pods = load.app.store.pods.all().values()
    node = load.kube.objects["nodes", "", next(pod.node for pod in pods if pod.node)]
    affected = {pod.key for pod in pods if pod.node == node["metadata"]["name"]}
    gone = {**node, "metadata": {**node["metadata"], "resourceVersion": "2"}, "spec": {"unschedulable": True}}
    load.app.events.node(gone, deleted=False)
    order = [await load.app.queue.get() for _ in range(len(load.app.queue))]
    others_between = 1 + len(affected) // (FAIR_EVERY - 1)
    assert affected <= set(order[: len(affected) + others_between])
    kind, placed = node["metadata"]["labels"]["gpu"], load.app.store.pods.placed
    jobs = [job for job in load.app.store.jobs.all().values() if job.spec is not None]
    short = {
        job.key
        for job in jobs
        if job.spec is not None
        and placed(job.key) < sum(pool.max_replicas for pool in job.spec.worker_pools)
        and any(pool.node_selector == {"gpu": kind} for pool in job.spec.worker_pools)
    }
    assert short - affected, "some other job may use the node"
    assert len({job.key for job in jobs} - short - affected) > 0, "some jobs are not concerned"
    assert set(order) == affected | short


def places(urgent: int) -> int:
    """Return the first places that hold all urgent keys, wherever the queue is in its rounds."""
    return urgent + 1 + urgent // (FAIR_EVERY - 1)


async def test_what_training_waits_for_comes_before_the_news_of_all_jobs() -> None:
    """A warning at a node, a lost worker, a changed spec and a new pod: none waits for passes over others' news."""
    load = await filled_cluster(FEW)
    app, jobs = load.app, list(load.app.store.jobs.all())
    pods = app.store.pods.all().values()

    async def order() -> list[JobKey]:
        found = [await app.queue.get() for _ in range(len(app.queue))]
        for key in found:
            app.queue.done(key)
        return found

    def news() -> None:
        for key in jobs:
            app.queue.add_news(key)

    node = load.kube.objects["nodes", "", next(pod.node for pod in pods if pod.node)]
    affected = {pod.key for pod in pods if pod.node == node["metadata"]["name"]}
    assert affected
    news()
    app.events.node({**node, "metadata": {**node["metadata"], "resourceVersion": "2"}, "spec": TAINTED}, deleted=False)
    assert affected <= set((await order())[: places(len(affected))])
    lost = next(pod for pod in pods if pod.ready)
    body = load.kube.objects["pods", lost.key.namespace, lost.name]
    news()
    app.events.pod(body, deleted=True)
    assert lost.key in (await order())[: places(1)]
    changed = load.kube.objects["heterotrainjobs", jobs[-1].namespace, jobs[-1].name]
    changed["metadata"] |= {"resourceVersion": "1000000", "generation": 7}
    news()
    app.events.job(changed, deleted=False)
    assert jobs[-1] in (await order())[: places(1)]
    news()
    app.events.pod(
        {**body, "metadata": {**body["metadata"], "resourceVersion": "1000001", "uid": "new"}}, deleted=False
    )
    assert lost.key in (await order())[: places(1)], "the pod's job may now have its first plan"


async def test_a_changed_node_takes_a_look_at_no_pod_of_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    load = await filled_cluster(FEW)
    pods = load.app.store.pods
    counts: Counter[str] = Counter()
    held = {pod.node for pod in pods.all().values() if pod.node}
    monkeypatch.setattr(pods, "all", lambda: CountedMapping(pods._views, counts))
    monkeypatch.setattr(pods, "of_job", lambda key: counts.update(reads=len(pods._of_job[key])))
    for name in sorted(held):
        node = load.kube.objects["nodes", "", name]
        gone = {**node, "metadata": {**node["metadata"], "resourceVersion": "2"}, "spec": {"unschedulable": True}}
        load.app.events.node(gone, deleted=False)
    assert counts["reads"] == 0


async def test_the_jobs_on_a_node_are_those_of_its_pods() -> None:
    load = await filled_cluster(FEW)
    pods = load.app.store.pods
    views = list(pods.all().values())
    pods.discard((views[0].key.namespace, views[0].name))
    pods.put(replace(views[1], phase="Failed", resource_version="1000000"))
    listed = [replace(pod, node="elsewhere", resource_version="1000000") for pod in views[2::5]]
    pods.replace([*listed, *views[3::5]], since=pods.begin_list())
    rest = list(pods.all().values())
    nodes = {pod.node for pod in views if pod.node} | {"elsewhere"}
    assert {node: set(pods.jobs_on(node)) for node in nodes} == {
        node: {pod.key for pod in rest if pod.node == node} for node in nodes
    }
    assert {pod.key: pods.placed(pod.key) for pod in views} == {
        pod.key: sum(each.key == pod.key and bool(each.node) and not each.phase_ended for each in rest) for pod in views
    }


async def test_a_restarted_operator_changes_no_pod_before_its_first_allocation() -> None:
    load = await filled_cluster(FEW)
    load.kube.calls.clear()
    load.app = App(load.kube, load.app.settings, threads=at_once())
    feed(load.app, bodies_of(load))
    while len(load.app.queue):
        await load.app.reconciler.handle(await load.app.queue.get())
    assert {(verb, plural) for verb, plural, _ in load.kube.calls} == {("get", "poddisruptionbudgets")}
    await load.app.allocator.run_once()
    load.kube.calls.clear()
    while len(load.app.queue):
        await load.app.reconciler.handle(await load.app.queue.get())
    rewritten = {("merge status", "heterotrainjobs")}
    assert {(verb, plural) for verb, plural, _ in load.kube.calls} <= rewritten, "it decides the same"


async def test_a_change_of_the_status_sends_only_what_differs() -> None:
    load = await filled_cluster(1)
    (key,) = load.app.store.jobs.all()
    job = load.app.store.jobs.get(key)
    assert job is not None
    sent: list[dict[str, Any]] = []
    merge = load.kube.merge

    async def noted(resource: Any, namespace: str, name: str, patch: dict[str, Any], **which: str) -> Any:
        sent.append(patch)
        return await merge(resource, namespace, name, patch, **which)

    load.kube.merge = noted  # type: ignore[method-assign]  # to see the patch
    memory = load.app.reconciler._memory_of(job)
    await load.app.statuses.write(job, job.status.model_copy(update={"step": 7}), memory)
    assert [each["status"] for each in sent] == [{"step": 7}]
    assert load.kube.objects["heterotrainjobs", key.namespace, key.name]["status"]["plan"]["desired"].startswith("1.")


async def test_no_pass_waits_for_an_event() -> None:
    """Events are published next to the passes. While the API server takes none, jobs go on, and memory is bounded."""
    load = LoadTest(Size(jobs=1, pods=PODS_PER_JOB))
    load.app.publisher.flush = _nothing  # type: ignore[method-assign]  # as if no Event were ever accepted
    await load.settle()
    assert sum(load.ready.values()) >= PODS_PER_JOB * 0.99
    assert not [call for call in load.kube.calls if call[:2] == ("create", "events")]
    (key,) = load.app.store.jobs.all()
    job = load.app.store.jobs.get(key)
    assert job is not None
    for number in range(MOST_WAITING + 10):
        load.app.publisher.add(job, JobEvent(warning=False, reason="Test", message=str(number)))
    assert len(load.app.publisher._waiting) == MOST_WAITING
    assert load.app.publisher._waiting[-1].event.message == str(MOST_WAITING + 9), "the oldest ones are dropped"


async def test_pods_that_differ_only_by_their_job_are_checked_once() -> None:
    load = await filled_cluster(MANY)
    jobs = [body for (plural, _, _), body in load.kube.objects.items() if plural == "heterotrainjobs"]
    kinds = {(job["metadata"]["namespace"], pool["name"]) for job in jobs for pool in job["spec"]["workerPools"]}
    assert sum(call[0] == "dry-run" for call in load.kube.calls) == len(kinds) < MANY * 1.75


async def _nothing() -> None:
    pass
