"""The kubelet's newest warning about a worker that does not start: only its events name a missing volume.

One worker of a job is looked at, at most every ``EVERY_S`` seconds: workers of one job wait for the same cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from heterotrain_operator.cluster_state.views import JobKey, PodView
from heterotrain_operator.kube.errors import KubeError
from heterotrain_operator.kube.resources import EVENTS
from heterotrain_operator.kube.verbs import Kube

log = structlog.get_logger()

PATIENCE_S = 15.0
"""Containers are usually created within this time; only then events are read."""
EVERY_S = 15.0
MOST_EVENTS = 100
"""Events that are read about one pod."""
_MOST_CHARACTERS = 1000
_PAST = ("Unhealthy", "FailedScheduling")
"""Reasons of warnings that say nothing about a pod with a node: its probe fails until it runs, and it has a node."""


@dataclass(slots=True)
class StartProblems:
    """The warnings about the pods of one job, by uid; times are on the monotonic clock."""

    found: dict[str, str] = field(default_factory=dict)
    looked_s: float = float("-inf")

    async def look(
        self, kube: Kube, key: JobKey, pods: Iterable[PodView], *, may_read: bool = True, wall_s: float, now_s: float
    ) -> float | None:
        """Read the events about the oldest pod that does not start; return the seconds until the next look, if any.

        Args:
            kube: the API server.
            key: the job.
            pods: its pods.
            may_read: whether events may be read now; otherwise a look that is due is due still.
            wall_s: now, in seconds since the epoch.
            now_s: now, on the monotonic clock.
        """
        creating = sorted((pod for pod in pods if pod.creating and not pod.deleting), key=lambda pod: pod.created_s)
        self.found = {pod.uid: self.found[pod.uid] for pod in creating if pod.uid in self.found}
        if not creating:
            return None
        early_s = creating[0].created_s + PATIENCE_S - wall_s
        wait_s = max(early_s, self.looked_s + EVERY_S - now_s)
        if wait_s > 0 or not may_read:
            return max(0.0, wait_s)
        self.looked_s = now_s
        self.found = {}
        try:
            warning = await _newest_warning(kube, key.namespace, creating[0].uid)
        except KubeError as error:  # the events are a help only, and older roles may not list them
            log.debug("events not read", job=key.name, namespace=key.namespace, error=str(error))
            return EVERY_S
        if warning:
            self.found = {creating[0].uid: warning}
        return EVERY_S

    def added_to(self, pods: Iterable[PodView]) -> list[PodView]:
        """Return the pods with their warnings."""
        return [replace(pod, start_problem=self.found[pod.uid]) if pod.uid in self.found else pod for pod in pods]


async def _newest_warning(kube: Kube, namespace: str, uid: str) -> str:
    newest, text, number = "", "", 0
    async for event in kube.list(EVENTS, namespace, fields=f"involvedObject.uid={uid},type=Warning"):
        number += 1
        time = _time_of(event)
        if time >= newest and str(event.get("reason") or "") not in _PAST:
            newest, text = time, f"{event.get('reason') or 'Warning'}: {event.get('message') or ''}"[:_MOST_CHARACTERS]
        if number >= MOST_EVENTS:
            break
    return text


def _time_of(event: Mapping[str, Any]) -> str:
    """Return when an event was last seen, as text that sorts by time."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
