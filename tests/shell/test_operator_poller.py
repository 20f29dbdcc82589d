"""Reading telemetry in fake time: new data queues the job, an outage is reported once, and training never waits."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from heterotrain_core.contract import keys, metrics
from heterotrain_operator.cluster_state.links import MeasuredLink
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.engine.app import STUCK_S, App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.learner import Learner
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.poller import Poller
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.prom.errors import PromBadAnswer, PromUnavailable
from heterotrain_operator.prom.vector import Vector, VectorSample
from heterotrain_operator.settings import PrometheusSettings, Settings
from support.executors import at_once
from support.fake_cluster import FakeCluster
from support.fakes import FakeKube, FakeProm
from support.unit_series import series, unit

pytestmark = pytest.mark.looptime

LABELS = {"job_uid": "job-uid", "worker": "job-w0", "worker_uid": "uid-a", "local_rank": "0"}


class SlowProm(FakeProm):
    """Takes its time for every answer."""

    def __init__(self, *, answers_after_s: float) -> None:
        super().__init__()
        self._answers_after_s = answers_after_s

    async def query(self, promql: str) -> Vector:
        found = await super().query(promql)
        await asyncio.sleep(self._answers_after_s)
        return found


class Bench:
    """A poller with a running job, a Prometheus and a queue."""

    def __init__(self, prom: FakeProm | None) -> None:
        self.cluster = FakeCluster().with_nodes("a", "b", "c").start()
        self.queue: Queue[JobKey] = Queue()
        self.prom = prom
        store = Store()
        self.job = parse_job(self.cluster.job)
        store.jobs.put(self.job)
        assert self.cluster.plan is not None
        plan = self.cluster.plan_json
        plan["ranks"][0] |= {"worker": "job-w0", "worker_uid": "uid-a"}
        self.cluster.plan["data"][keys.PLAN_KEY] = json.dumps(plan)
        plan_object = self.cluster.plan_view
        assert plan_object is not None
        store.plans.put(plan_object)
        loop = asyncio.get_running_loop()
        self.started_s = loop.time()
        operator_metrics = OperatorMetrics()
        clocks = Clocks(loop.time, lambda: self.cluster.now_s + loop.time() - self.started_s)
        self.learner = Learner(store, self.queue, operator_metrics, clocks=clocks, threads=at_once())
        self.poller = Poller(
            prom,
            store,
            self.queue,
            operator_metrics,
            PrometheusSettings(url="http://prometheus", poll_s=1.0, stale_s=30.0),
            learner=self.learner,
            threads=at_once(),
            clocks=clocks,
        )

    def answer(self, step: int, at_s: float, labels: dict[str, str] = LABELS) -> None:
        """Let Prometheus hold one scrape of one member."""

        def answers(promql: str) -> tuple[VectorSample, ...]:
            time_s = self.cluster.now_s + at_s
            if promql.startswith("sum"):
                return (VectorSample({"job_uid": "job-uid"}, time_s),)
            return (VectorSample({"__name__": metrics.STEP, **labels}, step), VectorSample(labels, time_s))

        assert self.prom is not None
        self.prom.answers = answers

    async def queued(self) -> bool:
        """Return whether the job was queued since the last call, by the learner's news too, and give it back."""
        while self.learner._waiting:
            await self.learner.learn_next()
        if not len(self.queue):
            return False
        self.queue.done(await self.queue.get())
        return True


async def test_new_data_queues_the_job_and_old_data_does_not() -> None:
    bench = Bench(FakeProm())
    bench.answer(step=1, at_s=0)
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(0.1)
    assert await bench.queued()
    await asyncio.sleep(5)
    assert not await bench.queued()
    bench.answer(step=2, at_s=5)
    await asyncio.sleep(1)
    assert await bench.queued()
    task.cancel()


async def test_a_member_s_pool_stays_known_without_its_pod() -> None:
    bench = Bench(FakeProm())
    pods = bench.poller._store.pods
    (first, *_) = bench.cluster.pod_views
    pods.put(first)
    identity = {**LABELS, "worker": first.name, "worker_uid": first.uid}
    bench.answer(step=1, at_s=0, labels=identity)
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(0.5)
    pods.discard((first.key.namespace, first.name))
    bench.answer(step=2, at_s=1)
    await asyncio.sleep(1)
    telemetry = bench.poller.telemetry_of(bench.job)
    assert telemetry.pools == {MemberId(first.uid, 0): first.pool}
    assert set(telemetry.gauges) == {MemberId("uid-a", 0)}
    task.cancel()


async def test_an_outage_is_reported_once_after_a_moment_and_so_is_its_end() -> None:
    prom = FakeProm()
    bench = Bench(prom)
    bench.answer(step=1, at_s=0)
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(0.5)
    await bench.queued()
    prom.error = PromUnavailable("Prometheus can't be reached: refused")
    await asyncio.sleep(3)
    assert not await bench.queued(), "one late answer is not an outage"
    await asyncio.sleep(5)
    assert await bench.queued()
    assert bench.poller.telemetry_of(bench.job).problem == "Prometheus can't be reached: refused"
    await asyncio.sleep(20)
    assert not await bench.queued()
    prom.error = None
    bench.answer(step=3, at_s=28)
    await asyncio.sleep(1.5)
    assert await bench.queued()
    assert bench.poller.telemetry_of(bench.job).problem == ""
    task.cancel()


async def test_missing_scrapes_are_reported_with_what_to_do() -> None:
    bench = Bench(FakeProm())
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(20)
    assert bench.poller.telemetry_of(bench.job).problem == ""
    await asyncio.sleep(20)
    telemetry = bench.poller.telemetry_of(bench.job)
    assert telemetry.reason == "NoSeries"
    assert "ht-metrics-0" in telemetry.problem
    assert "monitoring.podMonitor.labels" in telemetry.problem, "the usual cause with kube-prometheus-stack"
    assert "30 s (prometheus.staleSeconds)" in telemetry.problem, "the usual cause with a long scrape interval"
    task.cancel()


async def test_a_prometheus_that_scrapes_once_a_minute_is_not_stale_until_scrapes_are_missing() -> None:
    bench = Bench(FakeProm())
    task = asyncio.create_task(bench.poller.run())
    for scrape in range(4):
        bench.answer(step=1 + scrape, at_s=60 * scrape)
        await asyncio.sleep(59)
        if scrape:
            assert bench.poller.telemetry_of(bench.job).problem == ""
        await asyncio.sleep(1)
    assert bench.poller.telemetry_of(bench.job).reason == "Fresh"
    await asyncio.sleep(130)
    telemetry = bench.poller.telemetry_of(bench.job)
    assert telemetry.reason == "Stale"
    assert "while Prometheus scraped every 60 s" in telemetry.problem
    task.cancel()


async def test_old_samples_are_reported() -> None:
    bench = Bench(FakeProm())
    bench.answer(step=1, at_s=0)
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(40)
    assert bench.poller.telemetry_of(bench.job).reason == "Stale"
    task.cancel()


async def test_without_a_prometheus_the_problem_names_the_value_to_set() -> None:
    bench = Bench(None)
    assert bench.poller.telemetry_of(bench.job).reason == "NotConfigured"
    assert "prometheus.url" in bench.poller.telemetry_of(bench.job).problem


async def test_jobs_that_do_not_train_are_not_read() -> None:
    prom = FakeProm()
    bench = Bench(prom)
    bench.cluster.job["status"]["completionTime"] = "2027-01-01T00:00:00Z"
    bench.cluster.job["metadata"]["resourceVersion"] = "2"
    bench.poller._store.jobs.put(parse_job(bench.cluster.job))
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(5)
    assert prom.queries == 0
    task.cancel()


async def test_all_series_are_read_once_for_each_scrape() -> None:
    prom = FakeProm()
    bench = Bench(prom)
    bench.answer(step=1, at_s=0)
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(0.5)
    assert prom.queries == 2
    await asyncio.sleep(10)
    assert prom.queries == 2 + 10
    bench.answer(step=2, at_s=10)
    await asyncio.sleep(1)
    assert prom.queries == 2 + 10 + 2
    task.cancel()


async def test_jobs_without_a_new_scrape_need_no_query_of_their_own() -> None:
    bench = Bench(FakeProm())
    other = replace(bench.job, key=JobKey("ns", "other"), uid="other-uid")
    bench.poller._store.jobs.put(other)
    assert bench.prom is not None
    asked: list[str] = []
    scrapes = {"job-uid": 10.0, "other-uid": 20.0}

    def answers(promql: str) -> tuple[VectorSample, ...]:
        asked.append(promql)
        if promql.startswith("sum"):
            return tuple(VectorSample({"job_uid": uid}, number) for uid, number in scrapes.items())
        time = VectorSample(LABELS, bench.cluster.now_s + scrapes["job-uid"])
        return (VectorSample({"__name__": metrics.STEP, **LABELS}, scrapes["job-uid"]), time)

    bench.prom.answers = answers
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(0.1)
    first = len(asked)
    await asyncio.sleep(10)
    assert len(asked) - first == 10, "one query each second for both jobs"
    assert all(promql.startswith("sum") for promql in asked[first:])
    scrapes["job-uid"] += 5.0
    first = len(asked)
    await asyncio.sleep(1)
    own = [promql for promql in asked[first:] if not promql.startswith("sum")]
    assert len(own) == 1, "series and times of scrapes come with one query"
    assert "job-uid" in own[0]
    task.cancel()


async def test_jobs_are_read_one_by_one_where_the_common_query_fails() -> None:
    bench = Bench(FakeProm())
    bench.poller._store.jobs.put(replace(bench.job, key=JobKey("ns", "other"), uid="other-uid"))
    bench.answer(step=1, at_s=0)
    assert bench.prom is not None
    known = bench.prom.answers

    def answers(promql: str) -> tuple[VectorSample, ...]:
        if promql.startswith("sum"):
            raise PromBadAnswer("too many series")
        return known(promql)

    bench.prom.answers = answers
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(0.1)
    assert bench.poller.telemetry_of(bench.job).sequence == 1
    task.cancel()


async def test_after_slow_reads_the_poller_rests_as_long() -> None:
    bench = Bench(SlowProm(answers_after_s=3.0))
    bench.answer(step=1, at_s=0)
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(6.5)
    assert bench.prom is not None
    before = bench.prom.queries
    await asyncio.sleep(5)
    assert bench.prom.queries == before, "two answers of 3 s, then 6 s of rest"
    await asyncio.sleep(1)
    assert bench.prom.queries == before + 1
    task.cancel()


async def test_one_odd_label_costs_one_series() -> None:
    """A number of 5,000 digits must not end the operator: Python refuses to convert it."""
    bench = Bench(FakeProm())
    bench.answer(step=1, at_s=0)
    good = bench.prom.answers if bench.prom else None

    def answers(promql: str) -> tuple[VectorSample, ...]:
        assert good is not None
        if promql.startswith("sum"):
            return good(promql)
        odd = {"__name__": metrics.STEP, **LABELS, "local_rank": "9" * 5000}
        return (*good(promql), VectorSample(odd, 3.0))

    assert bench.prom is not None
    bench.prom.answers = answers
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(2)
    assert not task.done()
    telemetry = bench.poller.telemetry_of(bench.job)
    assert telemetry.gauges[MemberId("uid-a", 0)].step == 1
    assert telemetry.dropped.startswith("series were dropped: 1 with invalid labels; e.g. local_rank=999")
    assert len(telemetry.dropped) <= 200
    task.cancel()


async def test_series_of_other_jobs_pods_are_dropped() -> None:
    bench = Bench(FakeProm())
    stranger = {**LABELS, "worker_uid": "uid-stranger"}
    bench.answer(step=10**12, at_s=0, labels=stranger)
    orphan, *_ = bench.cluster.pod_views
    bench.poller._store.pods.put(replace(orphan, uid="uid-orphan", owner_uid=""))
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(1)
    telemetry = bench.poller.telemetry_of(bench.job)
    assert (telemetry.gauges, telemetry.newest_sample_s) == ({}, 0.0)
    assert telemetry.dropped == "series were dropped: 2 of other workers; e.g. worker_uid=uid-stranger"
    bench.answer(step=10**12, at_s=1, labels={**LABELS, "worker_uid": "uid-orphan"})
    await asyncio.sleep(1)
    assert bench.poller.telemetry_of(bench.job).gauges == {}
    task.cancel()


async def test_a_scrape_in_the_far_future_is_dropped() -> None:
    bench = Bench(FakeProm())
    bench.answer(step=1, at_s=1e9)
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(40)
    telemetry = bench.poller.telemetry_of(bench.job)
    assert (telemetry.newest_sample_s, telemetry.reason) == (0.0, "Stale")
    task.cancel()


async def test_an_answer_that_is_too_large_is_a_problem_of_the_job() -> None:
    prom = FakeProm()
    bench = Bench(prom)
    prom.error = PromBadAnswer("the answer of Prometheus is larger than 32 MiB")
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(10)
    telemetry = bench.poller.telemetry_of(bench.job)
    assert (telemetry.reason, telemetry.problem) == ("InvalidAnswer", "the answer of Prometheus is larger than 32 MiB")
    task.cancel()


async def test_an_unexpected_error_does_not_end_the_reads() -> None:
    bench = Bench(FakeProm())
    assert bench.prom is not None

    def fail(_: str) -> tuple[VectorSample, ...]:
        raise ArithmeticError("x" * 1000)

    bench.prom.answers = fail
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(2)
    telemetry = bench.poller.telemetry_of(bench.job)
    assert telemetry.reason == "InvalidAnswer"
    assert len(telemetry.problem) <= 200
    bench.answer(step=1, at_s=2)
    await asyncio.sleep(1)
    assert not task.done()
    assert bench.poller.telemetry_of(bench.job).problem == ""
    task.cancel()


async def test_a_round_that_hangs_makes_the_operator_unhealthy() -> None:
    app = App(
        FakeKube(),
        Settings(leader_election=False),
        threads=at_once(),
        clocks=Clocks(monotonic=asyncio.get_running_loop().time),
    )
    app._synced.set()
    app.poller._prom = SlowProm(answers_after_s=STUCK_S * 10)
    for number in range(3):
        app.store.jobs.put(replace(a_training_job(), uid=f"uid-{number}", key=JobKey("ns", f"job-{number}")))
    polling = asyncio.create_task(app.poller.run())
    await asyncio.sleep(STUCK_S - 1.0)
    app._listed_s = asyncio.get_running_loop().time()
    assert app.healthy
    await asyncio.sleep(2.0)
    assert not app.healthy
    polling.cancel()


async def test_an_allocation_that_hangs_makes_the_operator_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App(
        FakeKube(),
        Settings(leader_election=False),
        threads=at_once(),
        clocks=Clocks(monotonic=asyncio.get_running_loop().time),
    )
    app._synced.set()
    monkeypatch.setattr(app.allocator, "_run_once", asyncio.Event().wait)
    allocating = asyncio.create_task(app.allocator.run())
    await asyncio.sleep(STUCK_S + 1.0)
    app._listed_s = asyncio.get_running_loop().time()
    assert not app.healthy
    allocating.cancel()


def a_training_job() -> JobView:
    return parse_job(FakeCluster().with_nodes("a", "b", "c").start().job)


def profiling(bench: Bench, labels: dict[str, str], *, complete: bool = True) -> list[str]:
    """Let Prometheus hold the profile of one rank's units; return the queries that it gets."""
    queries: list[str] = []
    rows = [VectorSample({**row, **labels}, value) for row, value in series([unit(0), unit(1)])]
    gauges = [row for row in rows if "unit" not in row.labels]
    own = bench.cluster.pod_views[0].pool
    measured = ((own, 5e8), ("elsewhere", 5e8), (own, 1e300))
    gauges += [
        VectorSample({"__name__": metrics.LINK_BANDWIDTH, "peer_pool": pool, **labels}, value)
        for pool, value in measured
    ]
    if not complete:
        gauges = [row for row in gauges if row.labels["__name__"] != metrics.UNIT_PROFILE_COMPLETE]

    def answers(promql: str) -> tuple[VectorSample, ...]:
        queries.append(promql)
        time_s = bench.cluster.now_s + asyncio.get_running_loop().time() - bench.started_s
        if promql.startswith("sum"):
            return (VectorSample({"job_uid": "job-uid"}, time_s),)
        if metrics.UNIT_BYTES in promql:
            return tuple(row for row in rows if "unit" in row.labels)
        return (*gauges, VectorSample(labels, time_s))

    assert bench.prom is not None
    bench.prom.answers = answers
    return queries


async def test_the_profile_of_each_pool_is_read_once_and_before_the_first_plan() -> None:
    bench = Bench(FakeProm())
    view = bench.cluster.pod_views[0]
    identity = {**LABELS, "worker": view.name, "worker_uid": view.uid}
    bench.cluster.job["spec"]["parallelism"] = {"mode": "Pipeline"}
    bench.cluster.job["status"]["plan"] = {}
    bench.cluster.job["metadata"]["resourceVersion"] = "2"
    job = parse_job(bench.cluster.job)
    bench.poller._store.jobs.put(job)
    bench.poller._store.pods.put(view)
    profiling(bench, identity, complete=False)
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(2.5)
    assert bench.poller.telemetry_of(job).profiles == {}
    await bench.queued()
    queries = profiling(bench, identity)
    await asyncio.sleep(5)
    found = bench.poller.telemetry_of(job).profiles
    assert {name: len(profile.units) for name, profile in found.items()} == {view.pool: 2}
    assert bench.poller.telemetry_of(job).links == {(view.pool, view.pool): MeasuredLink(5e8, 0.0)}
    assert await bench.queued()
    assert sum(metrics.UNIT_BYTES in query for query in queries) == 1
    # The next workers of a suspended job may train another model.
    bench.cluster.job["status"].pop("startTime")
    bench.cluster.job["metadata"]["resourceVersion"] = "3"
    bench.poller._store.jobs.put(parse_job(bench.cluster.job))
    await asyncio.sleep(2)
    assert bench.poller.telemetry_of(job).profiles == {}
    assert bench.poller.telemetry_of(job).links == {}
    task.cancel()


async def test_a_job_without_planned_layouts_is_not_asked_for_profiles() -> None:
    bench = Bench(FakeProm())
    view = bench.cluster.pod_views[0]
    bench.poller._store.pods.put(view)
    queries = profiling(bench, {**LABELS, "worker": view.name, "worker_uid": view.uid})
    task = asyncio.create_task(bench.poller.run())
    await asyncio.sleep(3)
    assert queries
    assert not any(metrics.UNIT_BYTES in query for query in queries)
    task.cancel()
