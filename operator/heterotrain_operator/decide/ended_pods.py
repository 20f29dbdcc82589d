"""Keeps or removes pods of ended workers: they stay for their logs and their other containers."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_operator.api.v1alpha1 import CleanPodPolicy
from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.lifecycle import ENDED_STAGES, LifeStage
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.waits import left_s
from heterotrain_operator.decide.workers.state import Worker, WorkerState

KEPT_FAILED_PODS = 5
"""So many failed pods are kept for their logs until the job ends; they use no resources once all containers ended."""
SIDECAR_S = 30.0
"""Time for the other containers of a failed worker to end; then the pod is deleted, because it still holds its node."""
COOLING_S = 10.0
"""Time before a worker that was killed from outside right after its start is replaced: the cause may persist."""
_QUICK_DEATH_S = 30.0
"""A worker that ends within this time of its creation counts as killed right after its start."""


def is_deleted(worker: Worker, stage: LifeStage, policy: CleanPodPolicy) -> bool:
    """Return whether a worker's pod is deleted in this stage."""
    if stage is LifeStage.SUSPENDED:
        return True
    if stage is LifeStage.FINISHING:
        return worker.state is WorkerState.WAITING  # it would start a training that is over
    if stage in ENDED_STAGES:
        runs = not (worker.pod.phase_ended or worker.pod.all_ended)
        return policy is CleanPodPolicy.ALL or (policy is CleanPodPolicy.RUNNING and runs)
    return False  # refused: running workers stay


def unneeded_ended_pods(context: JobContext) -> tuple[PodView, ...]:
    """Return ended pods that are not needed any more: all disrupted ones, and all failed ones but the newest."""
    counted = [w for w in context.workers if w.ended and w.pod.uid in context.accounts.accounted]
    failed = sorted((w for w in counted if w.state is WorkerState.FAILED), key=lambda worker: worker.pod.created_s)
    old = failed[: max(0, len(failed) - KEPT_FAILED_PODS)]
    held = [w for w in failed if w not in old and sidecar_wait_s(w, now_s=context.now_s) == 0]
    gone = [
        w
        for w in counted
        if w.state in (WorkerState.LEFT, WorkerState.DISRUPTED) and not cooling_s([w], now_s=context.now_s)
    ]
    return tuple(worker.pod for worker in (*gone, *old, *held))


def sidecar_wait_s(worker: Worker, *, now_s: float) -> float | None:
    """Return for how long the other containers of a failed worker may still run; ``None`` when all have ended."""
    if worker.state is not WorkerState.FAILED or worker.pod.phase_ended:
        return None
    end_s = worker.pod.ended.finished_s if worker.pod.ended else worker.pod.created_s
    return min(SIDECAR_S, max(0.0, end_s + SIDECAR_S - now_s))


def cooling_s(workers: Sequence[Worker], *, now_s: float) -> float:
    """Return for how many more seconds no worker is created because one was killed right after its start."""
    waits = [0.0]
    for worker in workers:
        if worker.state is WorkerState.DISRUPTED and not worker.pod.disruption and not worker.pod.deleting:
            end_s = worker.pod.ended.finished_s if worker.pod.ended else worker.pod.created_s
            if end_s - worker.pod.created_s < _QUICK_DEATH_S:
                waits.append(left_s(end_s, COOLING_S, now_s=now_s))
    return max(waits)
