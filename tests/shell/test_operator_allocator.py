"""The task that allocates nodes: a new job waits for the first decision, and a bug leaves all grants unchanged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state.parse import parse_job, parse_node, parse_pod, rfc3339
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.decide.allocation import competition as competition_module
from heterotrain_operator.decide.allocation.allocate import decide_allocation
from heterotrain_operator.decide.allocation.competition import Competition
from heterotrain_operator.decide.grant import UNLIMITED, JobGrant
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.decide.workers.capacity import Shape
from heterotrain_operator.engine import allocator
from heterotrain_operator.engine.allocator import PATIENCE_S, Allocator, shapes_of
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.learner import Learner
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.engine.resync import list_foreign, relist
from heterotrain_operator.settings import Settings
from support.executors import at_once
from support.fake_cluster import NOW_S, job_body, node_body, pool
from support.fakes import FakeKube

DECIDE = "heterotrain_operator.engine.allocator.decide_allocation"


class Bench:
    """An allocator with nodes and jobs, and a clock that tests advance."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = Store()
        self.queue: Queue[JobKey] = Queue()
        self.metrics = OperatorMetrics()
        clocks, threads = Clocks(lambda: self.now_s, lambda: NOW_S), at_once()
        self.allocator = Allocator(
            self.store,
            self.queue,
            self.metrics,
            telemetry_of=lambda _: Telemetry(),
            learner=Learner(self.store, self.queue, self.metrics, clocks=clocks, threads=threads),
            clocks=clocks,
            threads=threads,
        )

    def add_node(self, name: str, cpu: str = "2") -> None:
        self.store.nodes.put(parse_node(node_body(name, name, cpu=cpu)))

    def add_job(self, name: str, *pools: dict[str, Any], version: str = "1", uid: str = "") -> JobKey:
        came = rfc3339(NOW_S + len(self.store.jobs.all()))
        body = job_body(*pools, name=name, uid=uid or f"uid-of-{name}", resourceVersion=version, creationTimestamp=came)
        self.store.jobs.put(parse_job(body))
        return JobKey("ns", name)

    def add_pod(self, key: JobKey, node: str, index: int) -> None:
        job = self.store.jobs.get(key)
        assert job is not None
        assert job.spec is not None
        pod = build_pod(job, job.spec.worker_pools[0], index, plan_version="")
        pod["metadata"] |= {
            "uid": f"uid-{key.name}-{index}",
            "resourceVersion": "1",
            "creationTimestamp": rfc3339(NOW_S),
        }
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": rfc3339(NOW_S)}
        pod["spec"]["nodeName"], pod["status"] = node, {"phase": "Running", "conditions": [ready]}
        view = parse_pod(pod)
        assert view is not None
        self.store.pods.put(view)

    def limits(self, key: JobKey) -> Any:
        job = self.store.jobs.get(key)
        assert job is not None
        grant = self.allocator.grant_of(job)
        return "undecided" if grant.undecided else grant.limits


def two_competing_jobs() -> tuple[Bench, JobKey, JobKey]:
    """Return two jobs that want three workers each on a node for two."""
    bench = Bench()
    bench.add_node("a")
    return bench, bench.add_job("one", pool("a", maxReplicas=3)), bench.add_job("two", pool("a", maxReplicas=3))


async def test_a_decision_queues_the_jobs_that_it_changes_and_only_once() -> None:
    bench, one, two = two_competing_jobs()
    assert bench.limits(one) == "undecided"
    await bench.allocator.run_once()
    assert {await bench.queue.get(), await bench.queue.get()} == {one, two}
    assert (bench.limits(one), bench.limits(two)) == ({"a": 1}, {"a": 1})
    bench.queue.done(one)
    bench.queue.done(two)
    await bench.allocator.run_once()
    assert len(bench.queue) == 0, "nothing changed, so no job is queued"
    assert bench.metrics.limited_jobs._value.get() == 2


async def test_other_words_for_the_same_grant_come_after_all_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the latest start of a waiting job, which moves with the predicted rates."""
    bench, one, two = two_competing_jobs()
    for job in (one, two):
        assert bench.limits(job) == "undecided"
    await bench.allocator.run_once()
    for _ in range(2):
        bench.queue.done(await bench.queue.get())
    decide = allocator.decide_allocation

    def reworded(*args: Any, **kwargs: Any) -> dict[JobKey, JobGrant]:
        return {key: replace(grant, lacks="other words") for key, grant in decide(*args, **kwargs).items()}

    monkeypatch.setattr(allocator, "decide_allocation", reworded)
    await bench.allocator.run_once()
    other = JobKey("ns", "other")
    bench.queue.add(other)
    assert [await bench.queue.get() for _ in range(3)] == [other, one, two]


async def test_workers_that_have_to_leave_are_counted_by_reason() -> None:
    bench = Bench()
    bench.add_node("a", cpu="4")
    one = bench.add_job("one", pool("a", maxReplicas=4))
    for index in range(4):
        bench.add_pod(one, "a", index)
    await bench.allocator.run_once()
    assert bench.limits(one) is None
    two = bench.add_job("two", pool("a", maxReplicas=4))
    await bench.allocator.run_once()
    counted = bench.metrics.registry.get_sample_value
    labels = {"change": "taken", "reason": "NodesShared"}
    assert counted("heterotrain_operator_moved_workers_total", labels) == 1, "it may never start"
    bench.store.pods.discard((one.namespace, "one-w3"))
    bench.add_pod(two, "a", 0)
    await bench.allocator.run_once()
    assert counted("heterotrain_operator_moved_workers_total", labels) == 2
    await bench.allocator.run_once()
    assert counted("heterotrain_operator_moved_workers_total", labels) == 2, "once is enough"


async def test_a_new_job_without_a_grant_makes_the_decision_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "SETTLE_S", 3600.0)  # any other decision comes after the test
    bench, one, two = two_competing_jobs()
    running = asyncio.create_task(bench.allocator.run())
    try:
        async with asyncio.timeout(30):
            assert bench.limits(one) == "undecided"
            queued = {await bench.queue.get(), await bench.queue.get()}
            assert queued == {one, two}
            for key in queued:
                bench.queue.done(key)
            three = bench.add_job("three", pool("a"))
            while bench.limits(three) == "undecided":  # it is also queued when the decision has taken long
                bench.queue.done(await bench.queue.get())
        assert bench.limits(three) == {"a": 0}
        assert not running.done()
    finally:
        running.cancel()


async def test_a_bug_with_some_jobs_keeps_their_grants_and_does_not_affect_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, one, two = two_competing_jobs()
    await bench.allocator.run_once()
    bench.add_node("b", cpu="1")
    others = [bench.add_job(name, pool("b", maxReplicas=2)) for name in ("p", "q")]

    def decide(competition: Competition, *, now_s: float, **options: Any) -> Any:
        if any(competitor.job.key == one for competitor in competition.competitors):
            raise ZeroDivisionError
        return decide_allocation(competition, now_s=now_s, **options)

    monkeypatch.setattr(DECIDE, decide)
    bench.add_job("one", pool("a", maxReplicas=1), version="2")
    await bench.allocator.run_once()
    assert (bench.limits(one), bench.limits(two)) == ({"a": 1}, {"a": 1})
    assert [bench.limits(key) for key in others] == [{"b": 1}, {"b": 0}]
    assert bench.metrics.allocations.labels(result="bug")._value.get() == 1


async def test_a_job_without_valid_pods_does_not_stop_the_allocation_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, one, two = two_competing_jobs()
    bad = bench.add_job("bad", pool("a"))

    def fails(job: JobView, *more: Any) -> dict[str, Shape]:
        if job.key == bad:
            raise TypeError("a bug")
        return shapes_of(job)

    monkeypatch.setattr("heterotrain_operator.engine.allocator.shapes_of", fails)
    await bench.allocator.run_once()
    assert (bench.limits(one), bench.limits(two)) == ({"a": 1}, {"a": 1})


async def test_a_new_job_without_a_decision_takes_all_nodes_that_fit_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, one, _ = two_competing_jobs()
    monkeypatch.setattr(DECIDE, None)
    assert bench.limits(one) == "undecided"
    await bench.allocator.run_once()
    assert bench.limits(one) == "undecided"
    bench.now_s += PATIENCE_S
    assert bench.limits(one) is None


async def test_a_new_job_under_an_old_name_inherits_nothing() -> None:
    bench, one, _ = two_competing_jobs()
    await bench.allocator.run_once()
    bench.add_job("one", pool("a", maxReplicas=3), version="2", uid="another")
    assert bench.limits(one) == "undecided"


async def test_jobs_that_take_no_part_need_no_decision() -> None:
    bench = Bench()
    body = job_body(spec={"suspend": True})
    assert bench.allocator.grant_of(parse_job(body)) is UNLIMITED


async def test_jobs_in_the_running_operator_get_only_their_grants() -> None:
    """Two jobs through the whole operator: events in, pods out, two workers each on a node for four."""
    kube = FakeKube()
    app = App(kube, Settings(leader_election=False, relist_s=3600.0), threads=at_once())
    kube.objects["nodes", "", "a"] = node_body("a", "a", cpu="4")
    keys = []
    for name in ("one", "two"):
        body = job_body(pool("a", maxReplicas=4), name=name, uid=f"uid-of-{name}")
        kube.objects["heterotrainjobs", "ns", name] = body
        keys.append(JobKey("ns", name))
    running = asyncio.create_task(app.run())

    def granted() -> list[list[int]]:
        jobs = [body for (plural, _, _), body in kube.objects.items() if plural == "heterotrainjobs"]
        return [[pool.get("granted") for pool in job.get("status", {}).get("pools", ())] for job in jobs]

    try:
        async with asyncio.timeout(30):
            while granted() != [[2], [2]]:  # noqa: ASYNC110  # the fake API server signals nothing
                await asyncio.sleep(0.01)
        pods = sorted(name for plural, _, name in kube.objects if plural == "pods")
        assert pods == ["one-w0", "one-w1", "two-w0", "two-w1"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_numbers_in_a_status_need_no_decision_and_a_changed_spec_does() -> None:
    app = App(FakeKube(), Settings(leader_election=False), threads=at_once())
    app.events.job(job_body(resourceVersion="1"), deleted=False)
    assert app.allocator._changed.is_set(), "a new job"
    app.allocator._changed.clear()
    app.events.job({**job_body(resourceVersion="2"), "status": {"step": 7}}, deleted=False)
    assert not app.allocator._changed.is_set()
    app.events.job(job_body(resourceVersion="3", generation=2), deleted=False)
    assert app.allocator._changed.is_set()


@pytest.mark.parametrize(
    ("watched", "foreign"),
    [((), {}), (("ns",), {"a": 2.0}), (("elsewhere",), {"a": 1.0}), (("ns", "elsewhere"), {})],
)
async def test_workers_of_another_operator_use_capacity(watched: tuple[str, ...], foreign: dict[str, float]) -> None:
    kube, store = FakeKube(), Store()
    for number, namespace in enumerate(("ns", "elsewhere", "elsewhere")):
        job = parse_job(job_body(pool("a"), namespace=namespace))
        assert job.spec is not None
        pod = build_pod(job, job.spec.worker_pools[0], number, plan_version="")
        pod["spec"]["nodeName"] = "a"
        kube.objects["pods", namespace, pod["metadata"]["name"]] = pod
    await list_foreign(kube, store, watched)
    assert {node: used["cpu"] for node, used in store.foreign_requests.items()} == foreign


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {keys.LABEL_MANAGED_BY: keys.MANAGED_BY},
        {keys.LABEL_MANAGED_BY: keys.MANAGED_BY, keys.LABEL_JOB: "job"},
        {keys.LABEL_MANAGED_BY: keys.MANAGED_BY, keys.LABEL_JOB: "job", keys.LABEL_WORKER_INDEX: "x"},
        {keys.LABEL_MANAGED_BY: keys.MANAGED_BY, keys.LABEL_JOB: "job", keys.LABEL_WORKER_INDEX: "0"},
    ],
)
async def test_no_label_hides_a_pod_from_the_capacity_of_its_node(labels: dict[str, str]) -> None:
    """Each pod is counted once, whoever it says it belongs to; none of these is a worker of the job."""
    kube, store = FakeKube(), Store()
    kube.objects["jobs", "ns", "job"] = job_body(pool("a"))
    resources = {"requests": {"cpu": "3"}}
    kube.objects["pods", "ns", "stranger"] = {
        "metadata": {"name": "stranger", "namespace": "ns", "uid": "u", "resourceVersion": "1", "labels": labels},
        "spec": {"nodeName": "a", "containers": [{"name": "main", "resources": resources}]},
        "status": {"phase": "Running"},
    }
    await relist(kube, store)
    await list_foreign(kube, store)
    assert store.used()["a"]["cpu"] == 3.0
    assert not [pod for pod in store.pods.of_job(JobKey("ns", "job")) if pod.owner_uid]


async def test_a_job_that_can_t_be_read_is_left_out_and_the_others_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, one, two = two_competing_jobs()
    good = competition_module.read_plan

    def read_plan(job: JobView, found: Any) -> Any:
        if job.key == one:
            raise TypeError("a bug")
        return good(job, found)

    monkeypatch.setattr(competition_module, "read_plan", read_plan)
    await bench.allocator.run_once()
    assert bench.limits(two) is None, "it competes with nobody"
    assert bench.limits(one) == "undecided", "its grant stays"
    counted = bench.metrics.registry.get_sample_value
    assert counted("heterotrain_operator_internal_errors_total", {"part": "the allocation"}) == 1
