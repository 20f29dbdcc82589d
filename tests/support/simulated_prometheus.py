"""A simulated Prometheus: it serves the counters of ranks of known speed over real HTTP.

The test passes the plan by which ranks train. Each query counts some more steps, part of them at a smaller share, so
that slopes can be separated from fixed parts. The series of ranks outside the plan disappear at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from heterotrain_core.contract import metrics
from heterotrain_core.contract.plan import ComputeTime

from support.ports import free_port

STEPS_PER_QUERY = 3
VARIATION = 0.01
Row = tuple[dict[str, str], float]


class SimulatedPrometheus:
    """Answers the operator's query about one job, and nothing to the one about all jobs: then each round reads it.

    Args:
        speeds: by pool, the time model of one rank.
        epoch_samples: samples of an epoch.
    """

    def __init__(self, speeds: Mapping[str, ComputeTime], *, epoch_samples: int) -> None:
        self._speeds = speeds
        self._epoch_samples = epoch_samples
        self._plan: dict[str, Any] = {}
        self._steps: dict[tuple[str, int], int] = {}
        self._runner: web.AppRunner | None = None
        self._port = free_port()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Start the server."""
        app = web.Application()
        app.router.add_post("/api/v1/query", self._query)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def stop(self) -> None:
        """Stop the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    def train(self, plan: Mapping[str, Any]) -> None:
        """Let the plan's members train from now on."""
        self._plan = dict(plan)

    async def _query(self, request: web.Request) -> web.Response:
        query = str((await request.post())["query"])
        rows = [] if query.startswith("sum by") else [*self._everything(), *self._times()]
        result = [{"metric": labels, "value": [time.time(), str(value)]} for labels, value in rows]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    def _times(self) -> list[Row]:
        return [(_identity(rank), time.time()) for rank in self._plan.get("ranks", [])]

    def _everything(self) -> list[Row]:
        rows: list[Row] = []
        members = [
            {**member, **rank, "pool": rank["pool"] or member["pool"]}
            for member, rank in zip(self._plan["members"], self._plan["ranks"], strict=True)
        ]
        for member in members:
            rows += [
                ({"__name__": name, **_identity(member)}, value)
                for name, value in (
                    (metrics.PLAN_GENERATION, self._plan["generation"]),
                    (metrics.PLAN_REVISION, self._plan["revision"]),
                    (metrics.EPOCH, 0),
                    (metrics.STEP, 1),
                    (metrics.EPOCH_SAMPLES, self._epoch_samples),
                    (metrics.SAMPLES_COMMITTED, 0),
                )
            ]
            share = member["share_samples"]
            for samples in {share, max(1, share * 4 // 5)}:
                key = (member["worker_uid"], samples)
                self._steps[key] = self._steps.get(key, 0) + STEPS_PER_QUERY
        speeds = {member["worker_uid"]: (member, self._speeds[member["pool"]]) for member in members}
        for (uid, samples), steps in self._steps.items():
            if uid in speeds:
                rows += _shape(*speeds[uid], samples, steps)
        return rows


def _identity(member: Mapping[str, Any]) -> dict[str, str]:
    return {
        metrics.LABEL_WORKER: member["worker"],
        metrics.LABEL_WORKER_UID: member["worker_uid"],
        metrics.LABEL_LOCAL_RANK: str(member["local_rank"]),
    }


def _shape(member: Mapping[str, Any], speed: ComputeTime, samples: int, steps: int) -> list[Row]:
    """Return the counters of this many steps with this share."""
    labels = {**_identity(member), metrics.LABEL_SHARE: str(samples), metrics.LABEL_MICRO_BATCH: str(samples)}
    before_s = speed.per_sample_s * samples + speed.fixed_s
    backward_s = speed.backward_per_sample_s * samples + speed.backward_fixed_s
    seconds = {
        metrics.PHASE_LOAD: 0.0,
        metrics.PHASE_FORWARD: before_s,
        metrics.PHASE_BACKWARD: backward_s,
        metrics.PHASE_UPDATE: speed.update_s,
        metrics.PHASE_COMPUTE: before_s + backward_s + speed.update_s,
        metrics.PHASE_STEP: before_s + backward_s + speed.update_s,
    }
    rows: list[Row] = [({"__name__": metrics.STEPS, **labels}, steps)]
    for phase, each_s in seconds.items():
        named = {**labels, metrics.LABEL_PHASE: phase}
        rows.append(({"__name__": metrics.PHASE_SECONDS, **named}, steps * each_s))
        rows.append(({"__name__": metrics.PHASE_SECONDS_SQUARED, **named}, steps * each_s**2 * (1 + VARIATION**2)))
    return rows
