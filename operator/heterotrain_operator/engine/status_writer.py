"""Writes statuses: only what differs, and what changes with every step in turns of all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from heterotrain_operator.api.status import HeteroTrainJobStatus, as_body
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobView
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.memory import JobMemory
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.kube.resources import JOBS
from heterotrain_operator.kube.verbs import Kube, merge_patch

# These fields of the status change with every step: they alone are written at most every ``status_interval_s``.
_FAST = frozenset(
    {
        *("reason", "step", "samples", "loss", "metrics", "samplesPerSecond", "stepSeconds", "efficiency"),
        *("prediction", "batchReason", "noiseScaleSamples", "progress", "progressPercentage"),
        *("estimatedRemainingSeconds", "workers", "cost", "costPerStep"),
    }
)

EARLY_S = 0.001
"""A timer may fire this much too early: then the pass does its work, instead of asking for another one."""
NUMBERS_PER_S = 20.0
"""Status updates a second that only bring new numbers, over all jobs: a thousand jobs write theirs each 50 s. Each goes
to all who watch jobs, and more would keep a small API server busy for nothing."""

log = structlog.get_logger()


class StatusWriter:
    """Writes the status of any job.

    Attributes:
        interval_s: least seconds between two updates of a job that only bring new numbers.
    """

    def __init__(
        self, kube: Kube, store: Store, metrics: OperatorMetrics, *, clocks: Clocks, interval_s: float
    ) -> None:
        self._kube = kube
        self._store = store
        self._metrics = metrics
        self._clocks = clocks
        self.interval_s = interval_s
        self._numbers_free_s = float("-inf")
        """When the next job may reserve its turn to write numbers."""
        self._undeclared: frozenset[str] = frozenset()
        """Fields that the API server's definition of jobs lacks."""

    def forget_undeclared(self) -> None:
        """Try all fields of the status again: the definition of jobs may have been updated."""
        self._undeclared = frozenset()

    def _note_undeclared(self, sent: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Note the fields of a status that the API server stored otherwise: its definition of jobs lacks parts of them.

        They are left out from then on. Otherwise each pass would send them again.
        """
        stored = answer.get("status") or {}
        if missing := {name for name, value in sent.items() if stored.get(name) != value}:
            self._undeclared |= missing
            log.warning(
                "the definition of jobs is older than this operator: the status lacks fields",
                fields=sorted(self._undeclared),
                hint="install crds/heterotrain.dev_heterotrainjobs.yaml of the operator's version",
            )

    async def write(self, job: JobView, status: HeteroTrainJobStatus | None, memory: JobMemory) -> float | None:
        """Write the status if it differs; return the seconds until delayed numbers may be written."""
        if status is None:
            return None
        desired, stored = as_body(status), job.status_body
        changed = {name for name in {*desired, *stored} if desired.get(name) != stored.get(name)}
        changed -= self._undeclared
        if not changed:
            return None
        if _without_messages(desired) == _without_messages(stored):
            changed.discard("conditions")  # only numbers in messages differ
        if changed <= _FAST and (left_s := self._numbers_wait_s(memory)) > EARLY_S:
            return left_s
        memory.numbers_slot_s = None
        before, desired = (
            {name: value for name, value in each.items() if name not in self._undeclared} for each in (stored, desired)
        )
        # The uid and the resourceVersion protect a recreated or changed job from an outdated status.
        metadata = {"uid": job.uid, "resourceVersion": job.resource_version}
        patch = {"metadata": metadata, "status": merge_patch(before, desired)}
        answer = await self._kube.merge(JOBS, job.key.namespace, job.key.name, patch, subresource="status")
        self._note_undeclared(desired, answer)
        memory.status_written_s = self._clocks.monotonic()
        if changed <= _FAST:
            memory.numbers_version = answer["metadata"]["resourceVersion"]
        self._metrics.failures.inc(max(0, status.restarts - job.status.restarts))
        self._metrics.disruptions.inc(max(0, status.disruptions - job.status.disruptions))
        if (known := self._store.jobs.get(job.key)) is not None:
            self._store.jobs.put(parse_job(answer, known, self._store.defaults))
        return None

    def _numbers_wait_s(self, memory: JobMemory) -> float:
        """Return the seconds until the job may write new numbers; it keeps its turn among all jobs."""
        now_s = self._clocks.monotonic()
        if memory.numbers_slot_s is None:
            memory.numbers_slot_s = max(now_s, self._numbers_free_s)
            self._numbers_free_s = memory.numbers_slot_s + 1 / NUMBERS_PER_S
        return max(memory.numbers_slot_s, memory.status_written_s + self.interval_s) - now_s


def _without_messages(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions without their messages."""
    return [{key: value for key, value in each.items() if key != "message"} for each in status.get("conditions", ())]
