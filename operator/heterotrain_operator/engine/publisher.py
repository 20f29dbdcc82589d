"""Publishes Events next to the passes: nothing depends on them, so no pass waits until the API server stores one.

Repeated messages about a job become one Event with a count.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from typing import NamedTuple

import structlog
from heterotrain_core.contract import keys

from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.cluster_state.views import JobView
from heterotrain_operator.decide.status.events import JobEvent
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.kube.errors import Conflict, KubeError
from heterotrain_operator.kube.resources import EVENTS, JOBS
from heterotrain_operator.kube.verbs import Body, Kube

MOST_WAITING = 2000
"""Events that may wait; with more, the oldest ones are dropped."""

log = structlog.get_logger()


class _Waiting(NamedTuple):
    """An Event about a job, and when it happened."""

    job: JobView
    event: JobEvent
    at: str


class Publisher:
    """A bounded queue of Events, published one after the other."""

    def __init__(self, kube: Kube, *, clocks: Clocks) -> None:
        self._kube = kube
        self._clocks = clocks
        self._waiting: deque[_Waiting] = deque(maxlen=MOST_WAITING)
        self._wake = asyncio.Event()

    def add(self, job: JobView, event: JobEvent) -> None:
        """Publish an Event soon."""
        self._waiting.append(_Waiting(job, event, rfc3339(self._clocks.wall())))
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            await self.flush()

    async def flush(self) -> None:
        """Publish all Events that wait; a failure is only logged."""
        self._wake.clear()
        while self._waiting:
            job, event, at = self._waiting.popleft()
            try:
                await _publish(self._kube, job, event, now=at)
            except KubeError as error:
                log.warning("Event not published", job=job.key.name, namespace=job.key.namespace, error=str(error))


async def _publish(kube: Kube, job: JobView, event: JobEvent, *, now: str) -> None:
    namespace, text = job.key.namespace, f"{job.uid}\0{event.reason}\0{event.message}"
    name = f"{job.key.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    about = {"apiVersion": JOBS.api_version, "kind": keys.KIND, **job.key._asdict(), "uid": job.uid}
    body: Body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": about,
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": keys.FIELD_MANAGER},
        "reportingComponent": f"{keys.GROUP}/operator",
        "reportingInstance": keys.FIELD_MANAGER,
    }
    try:
        await kube.create(EVENTS, body)
    except Conflict:
        existing = await kube.get(EVENTS, namespace, name)
        patch = {"count": int(existing.get("count") or 1) + 1, "lastTimestamp": now}
        await kube.merge(EVENTS, namespace, name, patch)
