"""Fits of many jobs: they hold up no other job, and use a bounded part of one core."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import replace

import pytest
from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state.parse import parse_job, parse_pod
from heterotrain_operator.cluster_state.telemetry import MemberId, Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.grants.grant import UNLIMITED
from heterotrain_operator.decide.inputs import JobInputs
from heterotrain_operator.decide.plan.revision import BoundaryDistance
from heterotrain_operator.engine.app import CLOCKS, App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.planning import LANE_PARTS, PlanningSlots
from heterotrain_operator.engine.reconcile import LARGE_JOB
from heterotrain_operator.settings import Settings
from heterotrain_operator.threads import Threads
from heterotrain_planner.perf.counters import MeanVariance, Observation
from support.executors import AtOnce, ByHand, at_once
from support.fake_cluster import FakeCluster, job_body
from support.fakes import FakeKube
from support.waiting import until

OBSERVATION = Observation(member="w/0", share_samples=8, steps=5, ended_s=1.0, compute=MeanVariance(mean=0.1))
NEWS = Telemetry(sequence=1, observations={MemberId("w", 0): (OBSERVATION,)})


def an_app(telemetry: dict[JobKey, Telemetry], executor: Executor | None = None, clocks: Clocks = CLOCKS) -> App:
    """Return an operator with a job for each telemetry."""
    threads = Threads(executor, executor) if executor else at_once()
    app = App(FakeKube(), Settings(leader_election=False), threads=threads, clocks=clocks)

    def telemetry_of(job: JobView) -> Telemetry:
        return telemetry[job.key]

    app.reconciler._sources = replace(app.reconciler._sources, telemetry_of=telemetry_of, grant_of=lambda _: UNLIMITED)
    for key in telemetry:
        body = job_body()
        body["metadata"] |= {"name": key.name, "uid": f"uid-{key.name}"}
        app.store.jobs.put(parse_job(body))
    return app


async def test_a_pass_over_other_jobs_goes_on_while_a_job_s_models_are_fitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, small = JobKey("ns", "large"), JobKey("ns", "small")
    executor = ByHand()
    app = an_app({large: NEWS, small: Telemetry()}, executor)
    monkeypatch.setattr("heterotrain_operator.engine.reconcile.decide", lambda _: Decision())
    pass_over_large = asyncio.create_task(app.reconciler.run_once(large))
    await until(lambda: executor.waiting == 1, "a fit", every_s=0.0)
    await app.reconciler.run_once(small)
    assert not pass_over_large.done()
    executor.step()
    await pass_over_large


async def test_a_decision_in_a_thread_sees_the_cluster_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that changes during an iteration would end the pass."""
    key = JobKey("ns", "large")
    app = an_app({key: NEWS})
    seen: list[JobInputs] = []

    def noted(inputs: JobInputs) -> Decision:
        seen.append(inputs)
        return Decision()

    monkeypatch.setattr("heterotrain_operator.engine.reconcile.decide", noted)
    await app.reconciler.run_once(key)
    assert seen[0].nodes is not app.store.nodes.all()
    before = seen[0].used()
    app.store.foreign_requests = {"node": {"cpu": 1.0}}
    assert seen[0].used() is before


async def test_the_fits_of_many_jobs_use_a_bounded_part_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred jobs have news each five seconds, and each fit takes 70 ms: all of them get their turns."""
    clock = [0.0]
    took_s, every_s, span_s = 0.07, 5, 300
    telemetry = {JobKey("ns", f"job-{n}"): NEWS for n in range(100)}
    app = an_app(telemetry, clocks=Clocks(monotonic=lambda: clock[0]))
    fits: dict[JobKey, int] = dict.fromkeys(telemetry, 0)
    passes = 0

    def slow(inputs: JobInputs) -> Decision:
        if inputs.replan:
            fits[inputs.job.key] += 1
            clock[0] += took_s
        return Decision()

    monkeypatch.setattr("heterotrain_operator.engine.reconcile.decide", slow)
    waiting: dict[JobKey, float] = {}
    for second in range(span_s):
        clock[0] = max(clock[0], float(second))
        for key in telemetry:
            if second % every_s == 0:
                telemetry[key] = replace(NEWS, sequence=second + 1)
            if second % every_s == 0 or waiting.get(key, float("inf")) <= clock[0]:
                again_s = await app.reconciler.run_once(key)
                passes += 1
                waiting[key] = clock[0] + again_s if again_s is not None else float("inf")
    busy = sum(fits.values()) * took_s / span_s
    assert busy <= 1.2 * LANE_PARTS[BoundaryDistance.NEAR]
    assert min(fits.values()) >= 3, "every job gets its turn"
    assert max(fits.values()) <= 2 * min(fits.values())
    assert passes <= 2 * len(telemetry) * span_s / every_s, "a job that waits does not ask again and again"


def test_jobs_near_their_boundary_do_not_wait_for_the_others() -> None:
    slots = PlanningSlots()
    far = [slots.reserve(BoundaryDistance.FAR, takes_s=0.1, now_s=10.0) for _ in range(3)]
    assert far == pytest.approx([10.0, 11.0, 12.0])
    assert slots.reserve(BoundaryDistance.NEAR, takes_s=0.1, now_s=10.0) == 10.0
    assert slots.reserve(BoundaryDistance.FAR, takes_s=0.1, now_s=20.0) == 20.0, "unused slots are not saved up"


async def test_only_a_large_job_is_decided_in_a_thread_without_news(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = JobKey("ns", "large"), JobKey("ns", "small")
    executor = AtOnce()
    app = an_app({large: Telemetry(), small: Telemetry()}, executor)
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.settle()
    body = next(iter(cluster.pods.values()))
    for key, number in ((small, LARGE_JOB), (large, LARGE_JOB + 1)):
        for index in range(number):
            labels = {**body["metadata"]["labels"], keys.LABEL_JOB: key.name, keys.LABEL_WORKER_INDEX: str(index)}
            metadata = {"name": f"{key.name}-worker-{index}", "uid": f"{key.name}-{index}", "labels": labels}
            pod = parse_pod({**body, "metadata": {**body["metadata"], **metadata}})
            assert pod is not None
            app.store.pods.put(pod)
    in_thread: dict[JobKey, bool] = {}

    def noted(inputs: JobInputs) -> Decision:
        in_thread[inputs.job.key] = executor.working
        return Decision()

    monkeypatch.setattr("heterotrain_operator.engine.reconcile.decide", noted)
    for key in (large, small):
        await app.reconciler.run_once(key)
    assert in_thread == {small: False, large: True}
