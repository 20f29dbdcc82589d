"""Keeps what was learned about a job's speed for the next job of the same program, in a ConfigMap of the namespace.

It is read once, before a job's first plan, and for each pool that joins later. It is written when a job ends, and now
and then while it trains. No pass waits for a write, and a job whose speeds can't be read starts without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from heterotrain_operator.api.kept_speed import KeptEntry
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobView
from heterotrain_operator.decide.kept_speeds import (
    NAME,
    config_map,
    entry_of,
    keeps_speeds,
    keys_by_pool,
    learned_speeds,
    read_entries,
    usable_speeds,
)
from heterotrain_operator.decide.status.events import JobEvent
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.learner import Learner
from heterotrain_operator.engine.poller import Poller
from heterotrain_operator.engine.publisher import Publisher
from heterotrain_operator.kube.errors import KubeError, NotFound
from heterotrain_operator.kube.resources import CONFIG_MAPS
from heterotrain_operator.kube.verbs import Body, Kube

FIRST_S = 60.0
"""Seconds of training after which a job's speeds are kept for the first time."""
EVERY_S = 600.0
"""Seconds between two writes for a job while it trains."""
LOOK_S = 10.0
"""Seconds between two looks for jobs whose speeds are to be written."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Noted:
    """Notes on one job; losing them does no harm. ``found`` has ``None`` for a pool without a kept speed."""

    due_s: float
    keys: dict[str, str] = field(default_factory=dict)
    found: dict[str, KeptEntry | None] = field(default_factory=dict)
    complained: bool = False
    ended: bool = False


class SpeedKeeper:
    """Reads and writes the ConfigMaps.

    Args:
        poller, learner: get what is known before a job's first plan, and have what is known at its end.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        publisher: Publisher,
        poller: Poller,
        learner: Learner,
        *,
        clocks: Clocks,
    ) -> None:
        self._kube = kube
        self._store = store
        self._publisher = publisher
        self._poller = poller
        self._learner = learner
        self._clocks = clocks
        self._jobs: dict[str, _Noted] = {}

    async def look_up(self, job: JobView) -> None:
        """Let the speeds of earlier jobs be known before the next plan."""
        if not self._poller.reads or not keeps_speeds(job) or job.status.completion_time is not None:
            return
        noted, pods = self._of(job), self._store.pods.of_job(job.key)
        if {pod.pool for pod in pods if pod.image_digest} <= noted.found.keys():
            return
        noted.keys = keys_by_pool(job, pods)
        new = {pool: key for pool, key in noted.keys.items() if pool not in noted.found}
        if not new:
            return
        try:
            data = (await self._read(job.key.namespace)).get("data") or {}
        except KubeError as error:
            log.warning("speeds not read", job=job.key.name, namespace=job.key.namespace, error=str(error))
            data = {}
        entries, problem = read_entries({key: data[key] for key in new.values() if key in data})
        if problem and not noted.complained:
            noted.complained = True
            event = JobEvent(warning=True, reason="SpeedsIgnored", message=f"ConfigMap {NAME}: {problem}")
            self._publisher.add(job, event)
        noted.found |= {pool: entries.get(key) for pool, key in new.items()}
        known = {pool: entry for pool, entry in noted.found.items() if entry is not None}
        usable = usable_speeds(job, pods, {pool: entry.speed for pool, entry in known.items()})
        jobs = ", ".join(sorted({known[pool].job for pool in usable}))
        self._poller.start_with(job, usable)
        self._learner.start_with(job, usable, f"speeds are those of job {jobs}" if usable else "")

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.write_due()

    async def write_due(self) -> None:
        """Write the speeds of all jobs whose time has come, one ConfigMap after the other."""
        jobs, now_s = self._store.jobs.all(), self._clocks.monotonic()
        self._jobs = {uid: noted for uid, noted in self._jobs.items() if uid in {job.uid for job in jobs.values()}}
        due: dict[str, dict[str, KeptEntry]] = {}
        for job in list(jobs.values()):
            if not keeps_speeds(job) or job.status.training_since is None:
                continue
            noted, ends = self._of(job), job.status.completion_time is not None
            if noted.ended or (now_s < noted.due_s and not ends):
                continue
            noted.due_s, noted.ended = now_s + EVERY_S, ends
            noted.keys = keys_by_pool(job, self._store.pods.of_job(job.key)) or noted.keys
            of_namespace = due.setdefault(job.key.namespace, {})
            shares, telemetry = self._learner.model_of(job).shares, self._poller.telemetry_of(job)
            for pool, speed in learned_speeds(shares, telemetry).items():
                if pool in noted.keys:
                    entry = entry_of(speed, pool=pool, job=job.key.name, now_s=self._clocks.wall())
                    of_namespace[noted.keys[pool]] = entry
        for namespace, new in due.items():
            if new:
                await self._write(namespace, new)

    async def _write(self, namespace: str, new: Mapping[str, KeptEntry]) -> None:
        try:
            known = await self._read(namespace)
            body = config_map(namespace, known, new)
            if body is None:
                log.warning("speeds not kept: the ConfigMap belongs to others", namespace=namespace, name=NAME)
            elif known:
                await self._kube.replace(CONFIG_MAPS, body)
            else:
                await self._kube.create(CONFIG_MAPS, body)
        except KubeError as error:  # another job will measure the same
            log.warning("speeds not kept", namespace=namespace, error=str(error))

    async def _read(self, namespace: str) -> Body:
        try:
            return await self._kube.get(CONFIG_MAPS, namespace, NAME)
        except NotFound:
            return {}

    def _of(self, job: JobView) -> _Noted:
        return self._jobs.setdefault(job.uid, _Noted(due_s=self._clocks.monotonic() + FIRST_S))
