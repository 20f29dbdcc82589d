"""Publishes Events next to the passes: nothing depends on them, so no pass waits until the API server stores one."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

import structlog

from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.cluster_state.views import JobView
from heterotrain_operator.decide.status.events import JobEvent
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.kube.errors import KubeError
from heterotrain_operator.kube.events import publish
from heterotrain_operator.kube.verbs import Kube

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
                await publish(
                    self._kube,
                    namespace=job.key.namespace,
                    name=job.key.name,
                    uid=job.uid,
                    warning=event.warning,
                    reason=event.reason,
                    message=event.message,
                    now=at,
                )
            except KubeError as error:
                log.warning("Event not published", job=job.key.name, namespace=job.key.namespace, error=str(error))
