"""Many jobs with telemetry, from the stand-in for Prometheus: queries are counted, and shares follow the speeds."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
import structlog
from heterotrain_core.contract import keys
from heterotrain_operator.engine import poller
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.metrics import RECONCILE_RESULTS
from heterotrain_operator.prom.vector import Vector, parse_answer
from heterotrain_operator.settings import PrometheusSettings, Settings
from heterotrain_operator.threads import Threads
from lab.scale.exporters import SCRAPE_S, SPEEDS, StandIn
from lab.scale.workload import Size
from support.executors import ByHand
from support.fake_cluster import NOW_S
from support.load import LoadTest

pytestmark = pytest.mark.looptime
JOBS = 8
FEW = 4
SPAN_S, COST_SPAN_S = 30, 15
TAKE_S = 0.16
MOST_PASSES_A_SCRAPE = 3.0
"""For a job: one with the news, one for shares that had to wait, and some for new plans and the status."""


class Telemetry:
    """The stand-in, without HTTP, in the loop's time."""

    def __init__(self, load: LoadTest) -> None:
        loop = asyncio.get_running_loop()
        self._load = load
        self.stand_in = StandIn(lambda: NOW_S + loop.time())
        self.queries: Counter[str] = Counter()
        for (plural, _, _), body in load.kube.objects.items():
            if plural == "configmaps":
                self.stand_in.take(body["data"][keys.PLAN_KEY])

    async def query(self, promql: str) -> Vector:
        self.queries[promql.partition("(")[0].partition("{")[0] or "everything"] += 1
        changes, self._load.kube.changes = self._load.kube.changes, []
        for plural, body, _ in changes:
            if plural == "configmaps":
                self.stand_in.take(body["data"][keys.PLAN_KEY])
        return parse_answer(json.dumps(self.stand_in.answer(promql)).encode())


async def test_each_scrape_of_each_job_is_read_once_and_shares_follow_the_speeds() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    loop = asyncio.get_running_loop()
    clocks = Clocks(loop.time, lambda: NOW_S + loop.time())
    load = LoadTest(Size(jobs=JOBS, pods=10 * JOBS), clocks=clocks)
    await load.settle()
    telemetry, app = Telemetry(load), load.app
    load.read_from(telemetry)
    tasks = [
        asyncio.create_task(each) for each in (app.poller.run(), app.learner.run(), app.reconciler.work(app.queue.get))
    ]
    await asyncio.sleep(SPAN_S)
    for task in tasks:
        task.cancel()
    structlog.reset_defaults()
    passes = sum(app.metrics.reconciles.labels(result=each)._value.get() for each in RECONCILE_RESULTS)
    assert passes <= 4 * JOBS * SPAN_S / SCRAPE_S, "no job asks for passes again and again"
    rounds, scrapes = telemetry.queries["sum by "], JOBS * SPAN_S / SCRAPE_S
    assert rounds == pytest.approx(SPAN_S / PrometheusSettings().poll_s, abs=2), "one query a round, for all jobs"
    assert set(telemetry.queries) == {"sum by ", "everything"}, "one query brings series and times of scrapes"
    assert scrapes - JOBS <= telemetry.queries["everything"] <= scrapes + 2 * JOBS
    pools = {name: speed.per_sample_s for name, speed in SPEEDS.items()}
    compared = 0
    for (plural, _, _), body in load.kube.objects.items():
        if plural != "configmaps":
            continue
        plan = json.loads(body["data"][keys.PLAN_KEY])
        by_pool = {member["pool"]: member["share_samples"] for member in plan["members"]}
        if len(by_pool) > 1:
            compared += 1
            assert sorted(by_pool, key=by_pool.__getitem__) == sorted(by_pool, key=pools.__getitem__, reverse=True)
    assert compared >= JOBS // 4


async def test_reads_of_many_jobs_use_a_bounded_part_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking an answer takes 0.16 s here, so taking all scrapes of eight jobs would keep a quarter of a core busy."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    loop, spent, taken = asyncio.get_running_loop(), [0.0], list[float]()
    clocks = Clocks(lambda: loop.time() + spent[0], lambda: NOW_S + loop.time())

    def slow(*args: Any, **kwargs: Any) -> bool:
        spent[0] += TAKE_S
        taken.append(loop.time())
        return take(*args, **kwargs)

    take = poller._take
    monkeypatch.setattr(poller, "_take", slow)
    load = LoadTest(Size(jobs=JOBS, pods=10 * JOBS), clocks=clocks)
    await load.settle()
    telemetry, app = Telemetry(load), load.app
    load.read_from(telemetry)
    task = asyncio.create_task(app.poller.run())
    await asyncio.sleep(SPAN_S)
    task.cancel()
    structlog.reset_defaults()
    most = (SPAN_S + spent[0]) * poller.TAKING_PART / TAKE_S
    assert most < 0.75 * JOBS * SPAN_S / SCRAPE_S, "not every scrape can be read"
    assert most / 2 <= len(taken) <= most + JOBS, "the first reads come before it is known what they cost"
    assert {job.status.start_time is not None for job in app.store.jobs.all().values()} == {True}
    assert len(telemetry.stand_in._jobs) == JOBS
    fresh = [app.poller.telemetry_of(job).reason for job in app.store.jobs.all().values()]
    assert fresh == ["Fresh"] * JOBS, "the last read of each job is recent enough"


async def test_waiting_for_a_thread_is_no_cost_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are held back by the processor time that they take. On a busy machine they wait, and that is not more."""
    loop, passed, threads = asyncio.get_running_loop(), [0.0], ByHand()
    clocks = Clocks(lambda: passed[0], lambda: NOW_S + loop.time())
    load = LoadTest(Size(jobs=1, pods=10), clocks=clocks)
    await load.settle()
    (job,), telemetry, app = load.app.store.jobs.all().values(), Telemetry(load), load.app
    app.threads = Threads(threads)
    await asyncio.sleep(2 * SCRAPE_S)
    load.read_from(telemetry)

    def slow(*args: Any, **kwargs: Any) -> Any:
        passed[0] += TAKE_S
        return take(*args, **kwargs)

    take = poller._take
    monkeypatch.setattr(poller, "_take", slow)
    reading = asyncio.create_task(app.poller._read(job, telemetry, asyncio.Semaphore()))
    await asyncio.sleep(1.0)
    assert threads.waiting == 1
    passed[0] += 2 * poller.MOST_TAKE_S
    threads.step()
    assert await reading
    assert app.poller.telemetry_of(job).gauges, "the answer was taken"
    assert app.poller._take_s == pytest.approx(TAKE_S)


async def costs(jobs: int, *, more_nodes: int = 0) -> Counter[str]:
    """Return queries, passes and requests of training jobs for some scrapes; reads are not held back here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    loop = asyncio.get_running_loop()
    clocks = Clocks(loop.time, lambda: NOW_S + loop.time())
    load = LoadTest(Size(jobs=jobs, pods=5 * jobs), more_nodes=more_nodes, clocks=clocks)
    await load.settle()
    telemetry, app = Telemetry(load), load.app
    load.kube.calls.clear()
    app.statuses.interval_s = Settings().status_interval_s
    load.read_from(telemetry)
    tasks = [
        asyncio.create_task(each) for each in (app.poller.run(), app.learner.run(), app.reconciler.work(app.queue.get))
    ]
    await asyncio.sleep(COST_SPAN_S)
    for task in tasks:
        task.cancel()
    structlog.reset_defaults()
    assert len(telemetry.stand_in._jobs) == jobs
    return Counter(
        queries_of_jobs=telemetry.queries["everything"],
        queries_of_all=telemetry.queries["sum by "],
        passes=int(sum(app.metrics.reconciles.labels(result=each)._value.get() for each in RECONCILE_RESULTS)),
        requests=len(load.kube.calls),
    )


@pytest.mark.heavy
async def test_telemetry_of_a_job_costs_the_same_among_more_jobs_and_nodes() -> None:
    few = await costs(FEW)
    many = await costs(3 * FEW)
    nodes = sum(Size(jobs=FEW, pods=5 * FEW).nodes.values())
    roomy = await costs(FEW, more_nodes=3 * nodes)
    assert min(few.values()) > 0, "all of them are counted"
    assert many["queries_of_all"] <= few["queries_of_all"] + 1, "one query a round, however many jobs"
    for kind in ("queries_of_jobs", "requests"):
        assert many[kind] / 3 <= 1.15 * few[kind], kind
    for kind in ("queries_of_jobs", "requests", "passes"):
        assert roomy[kind] <= 1.1 * few[kind], kind
    for found, jobs in ((few, FEW), (many, 3 * FEW)):  # shares of many jobs wait, which makes a second pass
        assert found["passes"] <= MOST_PASSES_A_SCRAPE * jobs * COST_SPAN_S / SCRAPE_S
