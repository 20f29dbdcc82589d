"""The stage of a job's life: refused, suspended, active, finishing, succeeded or failed.

A failed job is tried again on request: it is the same job, so it continues from its own newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from heterotrain_core.contract.outcome import Cause
from heterotrain_core.uris import job_folder

from heterotrain_operator.api.conditions import ConditionType, condition_holds, find_condition
from heterotrain_operator.api.failures import FailureAction
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.saved import saved_by
from heterotrain_operator.cluster_state.views import JobView, PodView
from heterotrain_operator.decide.waits import left_s
from heterotrain_operator.decide.workers.failures import Accounts
from heterotrain_operator.decide.workers.state import Worker, WorkerState

_HOUR_S = 3600.0
FINISHING_S = 30.0
"""Time that the other workers get to end by themselves once one has finished."""
_MOST_WORDS = 400


class LifeStage(StrEnum):
    """Stage of a job's life."""

    INVALID = "Invalid"
    SUSPENDED = "Suspended"
    ACTIVE = "Active"
    FINISHING = "Finishing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


ENDED_STAGES = frozenset({LifeStage.SUCCEEDED, LifeStage.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The API server's answer to a dry run of the job's pods; ``known`` is False before the first one."""

    known: bool
    ok: bool = True
    reason: str = "Valid"
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The stage with its reason, and the seconds after which it may change by time alone (``None`` for never)."""

    stage: LifeStage
    reason: str
    message: str
    again_s: float | None = None


def decide_life(
    job: JobView, workers: Sequence[Worker], accounts: Accounts, acceptance: Acceptance, *, now_s: float
) -> Life:
    """Return the stage of a job. An end stays, unless a user asks for another try of a failed job."""
    for ended, kind in ((LifeStage.SUCCEEDED, ConditionType.SUCCEEDED), (LifeStage.FAILED, ConditionType.FAILED)):
        known = find_condition(job.status.conditions, kind)
        if known is not None and known.status == "True":
            return Life(stage=ended, reason=known.reason, message=known.message)
    life = _not_ended(job, workers, accounts, acceptance, now_s=now_s)
    if life.stage is not LifeStage.FAILED:
        return life
    return replace(life, message=with_way_on(job, (worker.pod for worker in workers), life.message))


def _not_ended(
    job: JobView, workers: Sequence[Worker], accounts: Accounts, acceptance: Acceptance, *, now_s: float
) -> Life:
    """Return the stage of a job that had neither succeeded nor failed before."""
    spec = job.spec
    if spec is None:
        return Life(stage=LifeStage.INVALID, reason="InvalidSpec", message=job.problem)
    if spec.suspend:
        return Life(stage=LifeStage.SUSPENDED, reason="Suspended", message="spec.suspend is true")
    finished = [worker for worker in workers if worker.state is WorkerState.FINISHED]
    if finished:
        return _finishing(job, spec, finished, workers, now_s=now_s)
    ruled = next((w for w in workers if w.action is FailureAction.FAIL and w.state is WorkerState.FAILED), None)
    if ruled is not None:
        return Life(stage=LifeStage.FAILED, reason="FailurePolicy", message=f"{ruled.pod.name}: {ruled.reason}")
    if accounts.restarts > spec.backoff_limit:
        return Life(
            stage=LifeStage.FAILED,
            reason="BackoffLimitExceeded",
            message=(
                f"workers failed {accounts.restarts} times, but backoffLimit is {spec.backoff_limit}; "
                f"the last one: {accounts.last_failure}"
            ),
        )
    # Running workers go on: only new ones have to wait until the template is corrected.
    if acceptance.known and not acceptance.ok and not any(worker.alive for worker in workers):
        return Life(stage=LifeStage.INVALID, reason=acceptance.reason, message=acceptance.message)
    return _deadlines(job, spec, now_s=now_s)


def _finishing(
    job: JobView, spec: HeteroTrainJobSpec, finished: Sequence[Worker], workers: Sequence[Worker], *, now_s: float
) -> Life:
    running = [
        worker for worker in workers if worker.state in (WorkerState.STARTING, WorkerState.READY, WorkerState.LEAVING)
    ]
    since_s = min(worker.pod.ended.finished_s for worker in finished if worker.pod.ended)
    if all(worker.cause in (Cause.PLAIN_SCRIPT, Cause.TORCHRUN_SCRIPT) for worker in finished):
        limit = _deadlines(job, spec, now_s=now_s)
        if running and limit.reason in ("DeadlineExceeded", "MaxCostReached"):
            return limit
        return _finishing_copies(finished, running, workers, since_s=since_s, again_s=limit.again_s)
    message = finished[0].reason or "every epoch is committed"
    wait_s = left_s(since_s, FINISHING_S, now_s=now_s)
    if running and wait_s:
        return Life(stage=LifeStage.FINISHING, reason="Finishing", message=message, again_s=wait_s)
    return Life(stage=LifeStage.SUCCEEDED, reason="Completed", message=message)


def _finishing_copies(
    finished: Sequence[Worker],
    running: Sequence[Worker],
    workers: Sequence[Worker],
    *,
    since_s: float,
    again_s: float | None,
) -> Life:
    """Return the stage of a job whose script does not use heterotrain: each worker runs it to its end.

    Args:
        finished: workers whose copy ended with exit code 0.
        running: workers whose copy still runs; nothing limits their time but the job's own deadlines.
        workers: all workers.
        since_s: when the first copy ended. Earlier failures were repeated and do not count.
        again_s: seconds until a deadline of the job; ``None`` without one.
    """
    own = finished[0].cause is Cause.PLAIN_SCRIPT and len(finished) > 1
    copies = "" if not own else f"; each of the {len(finished)} workers ran a copy of its own"
    message = f"{finished[0].reason}{copies}"
    failed = [w for w in workers if w.state is WorkerState.FAILED and w.pod.ended and w.pod.ended.finished_s >= since_s]
    if running:
        message = f"{message}; {len(running)} copies still run"
        return Life(stage=LifeStage.FINISHING, reason="Finishing", message=message, again_s=again_s)
    if failed:
        message = f"{failed[0].pod.name}: {failed[0].reason}; {len(finished)} other copies of the script succeeded"
        return Life(stage=LifeStage.FAILED, reason="CopyFailed", message=message)
    return Life(stage=LifeStage.SUCCEEDED, reason="Completed", message=message)


def _deadlines(job: JobView, spec: HeteroTrainJobSpec, *, now_s: float) -> Life:
    """Return the failure of a job whose deadline is over or whose money is spent, or that it is active.

    The deadlines of a job that is refused do not run: it has not started, uses no node, and may still be corrected.
    """
    start_s = min(now_s, seconds(job.status.start_time))
    may_wait = []
    for limit_s, reason, message, applies in (
        (
            spec.active_deadline_seconds,
            "DeadlineExceeded",
            "the job did not finish within activeDeadlineSeconds",
            True,
        ),
        (
            spec.pre_running_deadline_seconds,
            "PreRunningDeadlineExceeded",
            "training did not begin within preRunningDeadlineSeconds",
            job.status.training_since is None,
        ),
    ):
        if limit_s is None or not applies or not start_s:
            continue
        rest_s = start_s + limit_s - now_s
        if rest_s <= 0:
            return Life(stage=LifeStage.FAILED, reason=reason, message=f"{message} ({limit_s} s)")
        may_wait.append(rest_s)
    if (left_s := _paid_for_s(job, spec, now_s=now_s)) is not None:
        if left_s <= 0:
            message = f"the job has cost all of maxCost ({spec.max_cost}): raise maxCost"
            return Life(stage=LifeStage.FAILED, reason="MaxCostReached", message=message)
        may_wait.append(left_s)
    return Life(stage=LifeStage.ACTIVE, reason="Active", message="", again_s=min(may_wait, default=None))


def _paid_for_s(job: JobView, spec: HeteroTrainJobSpec, *, now_s: float) -> float | None:
    """Return for how many seconds ``maxCost`` still pays at the present price; ``None`` while nothing ends that."""
    cost = job.status.internal.cost
    if spec.max_cost is None or cost is None:
        return None
    spent = cost.amount + cost.per_hour * max(0.0, now_s - seconds(cost.until)) / _HOUR_S
    left = float(spec.max_cost) - spent
    if left <= 0 or not cost.per_hour:
        return 0.0 if left <= 0 else None
    return left / cost.per_hour * _HOUR_S


def asks_for_retry(job: JobView) -> bool:
    """Return whether a failed job is to be tried again, by a request that was not followed yet."""
    asked = bool(job.retry_request) and job.retry_request != job.status.internal.retried
    return asked and condition_holds(job.status.conditions, ConditionType.FAILED)


def tried_again(job: JobView) -> JobView:
    """Return a failed job as one that has not ended; its failures and deadlines count from now on."""
    internal = job.status.internal.model_copy(update={"retried": job.retry_request})
    others = tuple(each for each in job.status.conditions if each.type != ConditionType.FAILED.value)
    status = job.status.model_copy(
        update={
            "conditions": others,
            "restarts": 0,
            "start_time": None,
            "training_since": None,
            "completion_time": None,
            "nodes_with_failures": (),
            "internal": internal,
        }
    )
    return replace(job, status=status)


def with_way_on(job: JobView, pods: Iterable[PodView], message: str) -> str:
    """Return why a job has failed, with the command that tries it again and the folder that it continues from."""
    command = f"`heterotrain retry {job.key.name}`"
    told = (saved_by(pod) for pod in pods)
    steps = [saved.step for saved in (job.status.last_checkpoint, *told) if saved is not None]
    if job.spec is None or job.spec.checkpoint is None or not steps:
        return f"{message[:_MOST_WORDS]}; {command} starts it again"
    names = {"namespace": job.key.namespace, "name": job.key.name, "uid": job.uid}
    folder = job_folder(job.spec.checkpoint.uri, **names)
    return f"{message[:_MOST_WORDS]}; {command} continues it from step {max(steps)} in {folder}"
