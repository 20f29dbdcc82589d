"""``python -m lab.scale.exporters``: a stand-in for Prometheus, with telemetry of every rank of every job.

It follows the jobs' plans, lets each rank train at the speed of its pool, scrapes all ranks of a job at the same time,
and answers the operator's queries with the form and the size of a real Prometheus' answers. Evaluation of queries and
storage are left out: they are not the operator's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from heterotrain_core.contract import keys, metrics
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import ComputeTime, Plan, Rank

SCRAPE_S = 5.0
EPOCH_SAMPLES = 100_000
"""Samples of an epoch: a boundary each few minutes."""
VARIATION = 0.03
"""Relative standard deviation of a rank's seconds from step to step."""
SPEEDS = {
    "a100": ComputeTime(per_sample_s=0.001, fixed_s=0.01, backward_per_sample_s=0.002, backward_fixed_s=0.01),
    "v100": ComputeTime(per_sample_s=0.002, fixed_s=0.015, backward_per_sample_s=0.004, backward_fixed_s=0.015),
    "t4-spot": ComputeTime(per_sample_s=0.004, fixed_s=0.02, backward_per_sample_s=0.008, backward_fixed_s=0.02),
}
"""Speed of a rank by its pool, in seconds of a step."""
_UID = re.compile(rf'{metrics.LABEL_JOB_UID}=~?"([^"]*)"')
Row = dict[str, Any]


@dataclass(slots=True)
class _Shape:
    """Sums over the steps of one rank with one share: steps, and seconds and their squares by phase."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(metrics.PHASES, 0.0))
    squares: dict[str, float] = field(default_factory=lambda: dict.fromkeys(metrics.PHASES, 0.0))


class SimulatedJob:
    """The ranks of one job, from scrape to scrape.

    Args:
        plan: its first plan.
        now_s: now; scrapes are every ``SCRAPE_S``, each job at its own time.
    """

    def __init__(self, plan: Plan, *, now_s: float) -> None:
        self.plan = plan
        self._random = random.Random(plan.job_uid)  # noqa: S311  # a simulation
        self._offset_s = self._random.random() * SCRAPE_S
        self.scraped_s = self._last_scrape_s(now_s)
        self._steps = 0
        self._samples = 0
        self._shapes: dict[tuple[str, int, int], _Shape] = {}

    def _last_scrape_s(self, now_s: float) -> float:
        return (now_s - self._offset_s) // SCRAPE_S * SCRAPE_S + self._offset_s

    def advance(self, now_s: float) -> None:
        """Train until the newest scrape."""
        newest_s = self._last_scrape_s(now_s)
        passed_s, self.scraped_s = newest_s - self.scraped_s, max(newest_s, self.scraped_s)
        if passed_s <= 0 or not self.plan.members:
            return
        times = {rank.rank: self._phases(rank) for rank in self.plan.ranks}
        step_s = max(phases[metrics.PHASE_COMPUTE] for phases in times.values())
        steps = max(1, round(passed_s / step_s))
        self._steps, self._samples = self._steps + steps, self._samples + steps * self.plan.global_batch_samples
        for rank in self.plan.ranks:
            share = self.plan.members[rank.member].share_samples
            shape = self._shapes.setdefault((rank.worker_uid, rank.local_rank, share), _Shape())
            noise = 1 + VARIATION / steps**0.5 * self._random.gauss(0, 1)
            phases = {name: noise * each_s for name, each_s in times[rank.rank].items()}
            phases |= {metrics.PHASE_SYNC: max(0.0, step_s - phases[metrics.PHASE_COMPUTE]), metrics.PHASE_STEP: step_s}
            shape.steps += steps
            for name, each_s in phases.items():
                shape.seconds[name] += steps * each_s
                shape.squares[name] += steps * each_s**2 * (1 + VARIATION**2)

    def _phases(self, rank: Rank) -> dict[str, float]:
        speed, share = SPEEDS[self.plan.pool_of(rank)], self.plan.members[rank.member].share_samples
        forward_s = speed.per_sample_s * share + speed.fixed_s
        backward_s = speed.backward_per_sample_s * share + speed.backward_fixed_s
        return {
            metrics.PHASE_LOAD: 0.0,
            metrics.PHASE_FORWARD: forward_s,
            metrics.PHASE_BACKWARD: backward_s,
            metrics.PHASE_UPDATE: 0.002,
            metrics.PHASE_COMPUTE: forward_s + backward_s + 0.002,
        }

    def scrape_times(self) -> list[Row]:
        """Return the times of the newest scrapes, as rows without a name."""
        return [_row({**_identity(self.plan, rank)}, self.scraped_s) for rank in self.plan.ranks]

    def everything(self) -> list[Row]:
        """Return all series."""
        gauges = {
            metrics.PLAN_GENERATION: self.plan.generation,
            metrics.PLAN_REVISION: self.plan.revision,
            metrics.EPOCH: self._samples // EPOCH_SAMPLES,
            metrics.STEP: self._steps,
            metrics.SAMPLES_COMMITTED: self._samples,
            metrics.EPOCH_SAMPLES: EPOCH_SAMPLES,
            metrics.CURSOR: self._samples % EPOCH_SAMPLES,
            metrics.EPOCH_STEP: self._steps % max(1, EPOCH_SAMPLES // max(1, self.plan.global_batch_samples)),
            metrics.GLOBAL_BATCH: self.plan.global_batch_samples,
            metrics.LOSS: 0.5,
        }
        rows: list[Row] = []
        ranks = {(rank.worker_uid, rank.local_rank): rank for rank in self.plan.ranks}
        for rank in self.plan.ranks:
            identity = _identity(self.plan, rank)
            rows += [_row({"__name__": name, **identity}, value) for name, value in gauges.items()]
        for (uid, local_rank, share), shape in self._shapes.items():
            if (uid, local_rank) not in ranks:
                continue
            labels = {
                **_identity(self.plan, ranks[uid, local_rank]),
                metrics.LABEL_SHARE: str(share),
                metrics.LABEL_MICRO_BATCH: str(share),
            }
            rows.append(_row({"__name__": metrics.STEPS, **labels}, shape.steps))
            for phase in metrics.PHASES:
                named = {**labels, metrics.LABEL_PHASE: phase}
                rows.append(_row({"__name__": metrics.PHASE_SECONDS, **named}, shape.seconds[phase]))
                rows.append(_row({"__name__": metrics.PHASE_SECONDS_SQUARED, **named}, shape.squares[phase]))
        return rows


class StandIn:
    """Answers the operator's queries about all jobs.

    Args:
        wall: seconds since the epoch.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._jobs: dict[str, SimulatedJob] = {}

    def take(self, text: str) -> None:
        """Let a job train by the newest of its plans; a text that is no plan is left out."""
        try:
            uid = str(json.loads(text)["job_uid"])
        except (ValueError, KeyError, TypeError):
            return
        plan = decode_plan(text, job_uid=uid)
        if isinstance(plan, Refused) or not plan.members:
            return
        job = self._jobs.get(uid)
        if job is None:
            self._jobs[uid] = SimulatedJob(plan, now_s=self._wall())
        elif plan.version > job.plan.version:
            job.advance(self._wall())
            job.plan = plan

    def answer(self, query: str) -> dict[str, Any]:
        """Return the answer to one of the operator's queries.

        Raises:
            ValueError: it is none of them.
        """
        found = _UID.search(query)
        if found is None:
            raise ValueError(f"no query of the operator: {query}")
        rows: list[Row] = []
        for uid in found[1].split("|"):
            job = self._jobs.get(uid)
            if job is None:
                continue
            job.advance(self._wall())
            if query.startswith("sum by"):
                rows.append(_row({metrics.LABEL_JOB_UID: uid}, job.scraped_s * len(job.plan.ranks)))
            else:
                rows += [*job.everything(), *job.scrape_times()]
        return {"status": "success", "data": {"resultType": "vector", "result": rows}}

    async def query(self, request: web.Request) -> web.Response:
        """Answer an instant query over HTTP."""
        text = json.dumps(self.answer(str((await request.post())["query"])), separators=(",", ":"))
        response = web.Response(text=text, content_type="application/json")
        response.enable_compression()
        return response


def _identity(plan: Plan, rank: Rank) -> dict[str, str]:
    """Return the labels of a rank's series, with those that a scrape of its pod adds."""
    return {
        metrics.LABEL_JOB_UID: plan.job_uid,
        metrics.LABEL_WORKER: rank.worker,
        metrics.LABEL_WORKER_UID: rank.worker_uid,
        metrics.LABEL_LOCAL_RANK: str(rank.local_rank),
        "container": "trainer",
        "endpoint": f"ht-metrics-{rank.local_rank}",
        "instance": f"{rank.address}:{keys.METRICS_PORT}",
        "job": "monitoring/heterotrain-workers",
        "pod": rank.worker,
    }


def _row(labels: Mapping[str, str], value: float) -> Row:
    return {"metric": dict(labels), "value": [0, repr(float(value))]}


async def _plans(kubectl: str, kubeconfig: str) -> AsyncIterator[str]:
    """Yield the text of each plan in the cluster, and of each later one."""
    path = "{.data." + keys.PLAN_KEY.replace(".", "\\.") + '}{"\\n"}'
    process = await asyncio.create_subprocess_exec(
        kubectl, "--kubeconfig", kubeconfig, "get", "configmaps", "--all-namespaces", "--watch",
        "-l", f"{keys.LABEL_MANAGED_BY}={keys.MANAGED_BY}", "-o", f"jsonpath={path}",
        stdout=asyncio.subprocess.PIPE, limit=2**24,
    )  # fmt: skip
    assert process.stdout is not None  # noqa: S101  # it is a pipe
    try:
        async for line in process.stdout:
            yield line.decode()
    finally:
        process.kill()


async def serve(port: int, kubectl: str, kubeconfig: str) -> None:
    """Answer until cancelled; a watch that ends begins again."""
    stand_in = StandIn()
    app = web.Application()
    app.router.add_post("/api/v1/query", stand_in.query)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    while True:
        async for text in _plans(kubectl, kubeconfig):
            stand_in.take(text)
        await asyncio.sleep(1.0)


def main() -> None:
    """Serve on a port of the loopback interface."""
    parser = argparse.ArgumentParser(prog="python -m lab.scale.exporters", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kubectl", required=True)
    parser.add_argument("--kubeconfig", required=True)
    options = parser.parse_args()
    try:
        asyncio.run(serve(options.port, options.kubectl, options.kubeconfig))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
