"""What passes over many jobs with telemetry cost the operator, without a cluster: ``operator_passes.py [JOBS]``.

The operator is the real one, in this process, with its event loop, workers and poller. An API server in memory stands
in for the real one, and a second process for Prometheus (``lab.scale.exporters``), asked over HTTP. So what is measured
is the operator's own work. Times of the processor are next to those of the wall clock: a busy machine changes only the
latter.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import multiprocessing
import pstats
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "deploy/dev/lab"), str(ROOT / "tests")]

# ruff: noqa: SLF001  # the parts of the operator that talk to others are replaced
import aiohttp  # noqa: E402  # after the path is set
import structlog  # noqa: E402  # after the path is set
from aiohttp import web  # noqa: E402  # after the path is set
from heterotrain_core.contract import keys  # noqa: E402  # after the path is set
from heterotrain_operator.engine import learner, poller, reconcile  # noqa: E402  # after the path is set
from heterotrain_operator.engine.clocks import Clocks  # noqa: E402  # after the path is set
from heterotrain_operator.engine.loop_delay import watch_delay  # noqa: E402  # after the path is set
from heterotrain_operator.engine.responsiveness import keep_responsive  # noqa: E402  # after the path is set
from heterotrain_operator.prom import client  # noqa: E402  # after the path is set
from heterotrain_operator.settings import Settings  # noqa: E402  # after the path is set
from heterotrain_operator.threads import Threads  # noqa: E402  # after the path is set
from lab.scale.exporters import SCRAPE_S, StandIn  # noqa: E402  # after the path is set
from lab.scale.workload import Size  # noqa: E402  # after the path is set
from machine import free_port, machine  # noqa: E402  # after the path is set
from support.fake_cluster import NOW_S  # noqa: E402  # after the path is set
from support.load import LoadTest  # noqa: E402  # after the path is set

WORKERS_PER_JOB = 10
ATTEMPTS = 100


def serve(port: int, offset_s: float) -> None:
    """Answer queries, and take plans, until ended."""
    stand_in = StandIn(lambda: time.time() + offset_s)

    async def take(request: web.Request) -> web.Response:
        for text in await request.json():
            stand_in.take(text)
        return web.Response()

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/api/v1/query", stand_in.query)
    app.router.add_post("/plans", take)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


class Costs:
    """Seconds of the wall clock and of the thread's processor, by what was done."""

    def __init__(self) -> None:
        self.wall_s: dict[str, list[float]] = defaultdict(list)
        self.cpu_s: dict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes its costs, by whether it runs in the event loop's thread."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            where = "loop" if threading.current_thread() is threading.main_thread() else "thread"
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.wall_s[f"{name}, {where}"].append(time.perf_counter() - wall_s)
                self.cpu_s[f"{name}, {where}"].append(time.thread_time() - cpu_s)

        return measured

    def timed_pass(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a coroutine function that notes its duration."""

        async def measured(*args: Any, **kwargs: Any) -> Any:
            wall_s = time.perf_counter()
            try:
                return await call(*args, **kwargs)
            finally:
                self.wall_s["a pass"].append(time.perf_counter() - wall_s)

        return measured


def part(values: list[float], share: float) -> float:
    """Return a quantile."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(rows: dict[str, list[float]], *, span_s: float) -> None:
    """Print one line for each kind."""
    for name, values in sorted(rows.items()):
        print(
            f"| {name} | {len(values) / span_s:.0f} | {1000 * part(values, 0.5):.1f} | {1000 * part(values, 0.99):.1f} "
            f"| {1000 * max(values):.1f} | {100 * sum(values) / span_s:.1f} % |"
        )


class Bench:
    """An operator with many training jobs, and the costs of its work.

    Args:
        load: the cluster that the jobs have filled.
        url: of the stand-in for Prometheus.
    """

    def __init__(self, load: LoadTest, url: str) -> None:
        self.load, self.costs, self._url = load, Costs(), url
        self.delays: list[float] = []
        app = load.app
        self.prom = client.PromClient(url, threads=app.threads, timeout_s=10.0)
        load.read_from(self.prom)
        app.allocator._telemetry_of = app.poller.telemetry_of
        app.statuses.interval_s = Settings().status_interval_s
        vars(reconcile)["decide"] = self.costs.timed("deciding", vars(reconcile)["decide"])
        vars(learner)["learn"] = self.costs.timed("learning", vars(learner)["learn"])
        vars(client)["parse_answer"] = self.costs.timed("parsing an answer", vars(client)["parse_answer"])
        vars(poller)["_take"] = self.costs.timed("taking it", vars(poller)["_take"])
        vars(app.reconciler)["handle"] = self.costs.timed_pass(app.reconciler.handle)

    async def deliver_plans(self, session: aiohttp.ClientSession) -> None:
        """Hand all plans to the stand-in, once it answers."""
        objects = self.load.kube.objects.items()
        plans = [body["data"][keys.PLAN_KEY] for (kind, _, _), body in objects if kind == "configmaps"]
        for _ in range(ATTEMPTS):
            with suppress(aiohttp.ClientError):
                await session.post(f"{self._url}/plans", json=plans)
                return
            await asyncio.sleep(0.1)
        raise SystemExit("the stand-in for Prometheus does not answer")

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Deliver changes to the operator, and new plans to the stand-in, until cancelled."""
        while True:
            changes = self.load.kube.changes
            plans = [body["data"][keys.PLAN_KEY] for kind, body, _ in changes if kind == "configmaps"]
            self.load._watch()
            if plans:
                await session.post(f"{self._url}/plans", json=plans)
            await asyncio.sleep(0.05)

    def tasks(self, session: aiohttp.ClientSession) -> list[asyncio.Task[None]]:
        """Start the operator's tasks."""
        app = self.load.app
        running: list[Coroutine[Any, Any, None]] = [
            keep_responsive(),
            self.watch(session),
            app.allocator.run(),
            app.publisher.run(),
            app.learner.run(),
            app.poller.run(),
            watch_delay(self.delays.append),
            *(app.reconciler.work(app.queue.get) for _ in range(app.settings.workers)),
            *(app.reconciler.work(app.queue.get_urgent) for _ in range(app.settings.workers)),
        ]
        return [asyncio.create_task(each) for each in running]


def resident_mib() -> float:
    """Return the memory of this process, with the programs that describe the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def measure(jobs: int, seconds: float, url: str, *, profile: bool) -> None:
    """Fill a cluster, let all jobs train, and print what that costs."""
    offset_s = NOW_S - time.time()
    clocks = Clocks(time.monotonic, lambda: time.time() + offset_s)
    load = LoadTest(Size(jobs=jobs, pods=WORKERS_PER_JOB * jobs), clocks=clocks, threads=Threads.few())
    started_s = time.perf_counter()
    await load.settle()
    print(
        f"{sum(load.ready.values())} workers of {jobs} jobs after {time.perf_counter() - started_s:.0f} s", flush=True
    )
    bench, profiler = Bench(load, url), cProfile.Profile()
    async with aiohttp.ClientSession() as session:
        await bench.deliver_plans(session)
        tasks = bench.tasks(session)
        await asyncio.sleep(3 * SCRAPE_S)  # the first reads bring the whole past
        for rows in (bench.costs.wall_s, bench.costs.cpu_s, bench.delays):
            rows.clear()
        if profile:
            profiler.enable()
        wall_s, cpu_s, loop_s = time.perf_counter(), time.process_time(), time.thread_time()
        await asyncio.sleep(seconds)
        span_s = time.perf_counter() - wall_s
        process, loop = (time.process_time() - cpu_s) / span_s, (time.thread_time() - loop_s) / span_s
        profiler.disable()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bench.prom.close()
    print(f"the operator: {process:.0%} of a core, its event loop alone {loop:.0%}, over {span_s:.0f} s\n")
    print("| what | a second | median, ms | p99, ms | longest, ms | of a core |\n| --- | --- | --- | --- | --- | --- |")
    table({f"{name} (wall)": each for name, each in bench.costs.wall_s.items()}, span_s=span_s)
    table({f"{name} (processor)": each for name, each in bench.costs.cpu_s.items()}, span_s=span_s)
    table({"event loop late by": bench.delays}, span_s=span_s)
    print(f"\nresident: {resident_mib():.0f} MiB for {jobs} jobs, with the API server in memory")
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(90)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="?", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--profile", action="store_true", help="profile the event loop's thread")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    print(machine())
    port = free_port()
    exporter = multiprocessing.get_context("spawn").Process(target=serve, args=(port, NOW_S - time.time()), daemon=True)
    exporter.start()
    try:
        asyncio.run(measure(options.jobs, options.seconds, f"http://127.0.0.1:{port}", profile=options.profile))
    finally:
        exporter.kill()


if __name__ == "__main__":
    main()
