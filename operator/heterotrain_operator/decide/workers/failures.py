"""Counts failures and disruptions, each worker exactly once, even if the operator restarts in between.

The pod of an ended worker stays in the API until the status counts its end. Its uid stays in the status as long as the
pod exists or a plan names it. So a new operator neither counts it again nor misses it. A worker whose node was lost and
came back leaves the status: its own failure counts later, and so does another loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from heterotrain_core.contract.outcome import Cause
from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.views import Departed
from heterotrain_operator.decide.waits import left_s
from heterotrain_operator.decide.workers.blamed_nodes import BlamedNode, blamed
from heterotrain_operator.decide.workers.disruptions import REPEATED, Row, continued, row_in
from heterotrain_operator.decide.workers.incidents import end_s, new_incidents
from heterotrain_operator.decide.workers.state import Worker, WorkerState

FIRST_DELAY_S = 2.0
LONGEST_DELAY_S = 300.0
MISMATCH_DELAY_S = 60.0
MOST_INCIDENTS = 1001
"""Times of failures that are kept with a window: one more than the largest ``backoffLimit``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The counters after this pass, and what is new in them.

    Attributes:
        restarts: failures of workers by their own fault; those of one incident count once.
        disruptions: workers lost through no fault of their own.
        accounted: uids of the workers in the two counts.
        failed: failed workers that were not counted before.
        disrupted: names of lost workers that were not counted before, each with the reason.
        lost: by pool, how many of those there are.
        last_failure: the newest failure in one sentence.
        last_failure_s: when the first failure of the newest incident was noticed; 0 for never.
        departed: lost members without a pod that the status so far does not count.
        counted: failures that count against ``backoffLimit``: with a window, those within it.
        incidents_s: times of those, oldest first; empty without a window.
        blamed: nodes with failures of this job, by name.
        answered: for each worker whose end another cut of the model answers, what happened.
        state_lost: why training begins again; empty if it does not.
        row: disruptions in a row.
    """

    restarts: int
    disruptions: int
    accounted: frozenset[str]
    failed: tuple[Worker, ...]
    disrupted: Mapping[str, str]
    lost: Mapping[str, int]
    last_failure: str | None
    last_failure_s: float
    departed: tuple[Departed, ...] = ()
    counted: int = 0
    incidents_s: tuple[float, ...] = ()
    blamed: tuple[BlamedNode, ...] = ()
    answered: tuple[str, ...] = ()
    state_lost: str = ""
    row: Row = field(default_factory=Row)


def account(
    status: HeteroTrainJobStatus,
    workers: Sequence[Worker],
    plan: Plan | None,
    *,
    departed: Sequence[Departed] = (),
    answered: Mapping[str, str] = MappingProxyType({}),
    window_s: float | None = None,
    counting: bool,
    step: int | None = None,
    now_s: float,
) -> Accounts:
    """Return the counters after this pass.

    Args:
        status: counters so far.
        workers: all workers of the job.
        plan: the plan in force: members without a pod were lost.
        departed: lost members that the plan in force no longer names.
        answered: by uid, what happened to each worker whose end another cut of the model answers: not a failure.
        window_s: seconds after which a failure no longer counts against ``backoffLimit``; ``None`` for never.
        counting: whether ends count; not while the job itself ends or is suspended.
        step: committed steps; ``None`` where they are not known.
        now_s: now.
    """
    before = frozenset(status.internal.accounted_workers)
    present = {worker.pod.uid for worker in workers}
    named = [Departed(r.worker_uid, r.worker, plan.pool_of(r)) for r in plan.ranks] if plan else []
    known = {each.uid: each for each in (*departed, *named)}
    failed = tuple(w for w in workers if w.state is WorkerState.FAILED and w.pod.uid not in before)
    mismatched = [w for w in failed if w.cause is Cause.VERSION_MISMATCH]
    recut = [w for w in failed if w.pod.uid in answered]
    # Lost workers took parts of the state with them: those ends count, not the ends of workers that hold the rest.
    rest = [w for w in failed if w.cause is Cause.STATE_LOST and w.action is None]
    # Nobody's failures: see ``mismatch_of``, another cut of the model, and the line above.
    nobodys = {w.pod.uid for w in (*mismatched, *recut, *rest)}
    failed = tuple(w for w in failed if w.pod.uid not in nobodys)
    lost = [
        w
        for w in workers
        if w.state in (WorkerState.DISRUPTED, WorkerState.LEFT, WorkerState.LOST) and w.pod.uid not in before
    ]
    gone = tuple(each for uid, each in known.items() if uid not in present and uid not in before)
    pools = Counter([*(worker.pod.pool for worker in lost), *(each.pool for each in gone)])
    newly = {w.pod.uid for w in (*failed, *mismatched, *recut, *rest, *lost)} | {each.uid for each in gone}
    returned = {w.pod.uid for w in workers if w.placed}
    disrupted = {w.pod.name: w.reason for w in lost} | {each.name: "its pod is gone" for each in gone}
    if not counting:  # their uids are kept nevertheless, so that a resumed job does not count them
        failed, recut, rest, disrupted, pools = (), [], [], {}, Counter()
    # A later time is of a clock that was ahead: the next delay counts from now.
    last_s = min(now_s, seconds(status.last_failure_time))
    incidents = new_incidents(failed, last_s, now_s=now_s)
    sentences = (*(answered[w.pod.uid] for w in recut), *(f"{w.pod.name}: {w.reason}" for w in failed))
    if rest:
        sentences = (*sentences, f"training begins again: {rest[0].reason}")
    names = [each.name for each in gone]
    row = continued(row_in(status.internal.disruptions), lost, names, step=step, now_s=now_s) if counting else Row()
    within_s = _within(status.internal.failure_times, incidents, window_s=window_s, now_s=now_s)
    return Accounts(
        restarts=status.restarts + incidents,
        counted=status.restarts + incidents if window_s is None else len(within_s),
        incidents_s=within_s,
        blamed=blamed(
            [
                BlamedNode(
                    name=n.name,
                    failures=n.failures,
                    last_s=min(now_s, seconds(n.last_time)),
                    reason=n.reason,
                    named=n.named,
                )
                for n in status.nodes_with_failures
            ],
            workers,
            failed,
            [w for w in lost if counting],
            at_fault=row.node if row.on_node >= REPEATED else "",
            incident=incidents > 0,
            now_s=now_s,
        ),
        disruptions=status.disruptions + len(disrupted),
        accounted=frozenset(uid for uid in (before | newly) - returned if uid in present or uid in known),
        failed=failed,
        disrupted=disrupted,
        lost=pools,
        last_failure=sentences[-1] if sentences else status.last_failure,
        last_failure_s=now_s if incidents else last_s,
        departed=gone,
        answered=tuple(answered[w.pod.uid] for w in recut),
        row=row,
        state_lost=f"{rest[0].pod.name}: {rest[0].reason}" if rest else "",
    )


def _within(known: Sequence[str], new: int, *, window_s: float | None, now_s: float) -> tuple[float, ...]:
    """Return the times of failures within the window, the oldest first, at most ``MOST_INCIDENTS``."""
    if window_s is None:
        return ()
    times_s = [*(min(now_s, seconds(each)) for each in known), *([now_s] * new)]
    return tuple(each for each in times_s if now_s - each < window_s)[-MOST_INCIDENTS:]


def mismatch_of(workers: Sequence[Worker]) -> Worker | None:
    """Return the newest worker whose image does not fit the operator, unless a newer one got ready.

    An administrator who upgrades the operator has not made the job fail: such ends count nothing. Workers are tried
    again after ``MISMATCH_DELAY_S``, because the image may have changed.
    """
    found = [w for w in workers if w.state is WorkerState.FAILED and w.cause is Cause.VERSION_MISMATCH]
    newest = max(found, key=lambda worker: worker.pod.created_s, default=None)
    if newest is None or any(w.pod.ready and w.pod.created_s >= newest.pod.created_s for w in workers):
        return None
    return newest


def mismatch_delay_s(workers: Sequence[Worker], *, now_s: float) -> float:
    """Return for how many more seconds no worker is created because the image does not fit the operator."""
    worker = mismatch_of(workers)
    return 0.0 if worker is None else left_s(end_s(worker), MISMATCH_DELAY_S, now_s=now_s)


def restart_delay_s(accounts: Accounts, *, now_s: float) -> float:
    """Return for how many more seconds no worker is created; the delay doubles with every incident."""
    if accounts.counted == 0:
        return 0.0
    delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(accounts.counted - 1, 20))
    return max(0.0, accounts.last_failure_s + delay_s - now_s)
