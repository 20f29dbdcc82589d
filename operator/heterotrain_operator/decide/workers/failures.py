"""Counts failures and disruptions, each worker exactly once, even if the operator restarts in between.

The pod of an ended worker stays in the API until the status counts its end. Its uid stays in the status as long as the
pod exists or a plan names it. So a new operator neither counts it again nor misses it. A worker whose node was lost and
came back leaves the status: its own failure counts later, and so does another loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from heterotrain_core.contract.outcome import Cause
from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.internal_status import InternalDisruptions
from heterotrain_operator.api.status import HeteroTrainJobStatus, NodeFailures
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.views import Departed
from heterotrain_operator.decide.waits import left_s
from heterotrain_operator.decide.workers.blamed_nodes import blamed
from heterotrain_operator.decide.workers.disruptions import NO_ROW, REPEATED, continued, end_s, new_incidents
from heterotrain_operator.decide.workers.state import Worker, WorkerState

FIRST_DELAY_S = 2.0
LONGEST_DELAY_S = 300.0
MISMATCH_DELAY_S = 60.0


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
    blamed: tuple[NodeFailures, ...] = ()
    answered: tuple[str, ...] = ()
    state_lost: str = ""
    row: InternalDisruptions = NO_ROW


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewEnds:
    """Ends that the status so far does not count, by what they mean.

    Attributes:
        failed: the workers' own failures.
        mismatched: nobody's failures: see ``mismatch_of``.
        recut: nobody's failures: another cut of the model answers them.
        rest: workers that hold a part of a state whose other parts were lost. The lost workers count, not these.
        lost: workers that were disrupted.
        gone: lost members without a pod.
    """

    failed: tuple[Worker, ...]
    mismatched: tuple[Worker, ...]
    recut: tuple[Worker, ...]
    rest: tuple[Worker, ...]
    lost: tuple[Worker, ...]
    gone: tuple[Departed, ...]

    @property
    def uids(self) -> frozenset[str]:
        """Uids of all of them."""
        workers = (*self.failed, *self.mismatched, *self.recut, *self.rest, *self.lost)
        return frozenset([*(worker.pod.uid for worker in workers), *(each.uid for each in self.gone)])

    @property
    def disrupted(self) -> dict[str, str]:
        """Names of the lost workers, each with the reason."""
        named = {worker.pod.name: worker.reason for worker in self.lost}
        return named | {each.name: "its pod is gone" for each in self.gone}

    @property
    def pools(self) -> Counter[str]:
        """By pool, how many workers were lost."""
        return Counter([*(worker.pod.pool for worker in self.lost), *(each.pool for each in self.gone)])

    def uncounted(self) -> _NewEnds:
        """Return what counts where ends do not count."""
        return replace(self, failed=(), recut=(), rest=(), lost=(), gone=())

    def sentences(self, answered: Mapping[str, str]) -> tuple[str, ...]:
        """Return what happened, the most important last."""
        found = (*(answered[w.pod.uid] for w in self.recut), *(f"{w.pod.name}: {w.reason}" for w in self.failed))
        return (*found, f"training begins again: {self.rest[0].reason}") if self.rest else found


def _new_ends(
    workers: Sequence[Worker],
    members: Iterable[Departed],
    answered: Mapping[str, str],
    before: frozenset[str],
) -> _NewEnds:
    present = {worker.pod.uid for worker in workers}
    kinds: dict[str, list[Worker]] = {"failed": [], "mismatched": [], "recut": [], "rest": [], "lost": []}
    for worker in workers:
        if worker.pod.uid in before:
            continue
        if worker.state in (WorkerState.DISRUPTED, WorkerState.LEFT, WorkerState.LOST):
            kinds["lost"].append(worker)
        elif worker.state is not WorkerState.FAILED:
            continue
        elif worker.cause is Cause.VERSION_MISMATCH:
            kinds["mismatched"].append(worker)
        elif worker.pod.uid in answered:
            kinds["recut"].append(worker)
        elif worker.cause is Cause.STATE_LOST and worker.action is None:
            kinds["rest"].append(worker)
        else:
            kinds["failed"].append(worker)
    gone = tuple(each for each in members if each.uid not in present and each.uid not in before)
    return _NewEnds(gone=gone, **{kind: tuple(found) for kind, found in kinds.items()})


def account(
    status: HeteroTrainJobStatus,
    workers: Sequence[Worker],
    plan: Plan | None,
    *,
    departed: Sequence[Departed] = (),
    answered: Mapping[str, str] = MappingProxyType({}),
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
        counting: whether ends count; not while the job itself ends or is suspended.
        step: committed steps; ``None`` where they are not known.
        now_s: now.
    """
    before = frozenset(status.internal.accounted_workers)
    named = [Departed(r.worker_uid, r.worker, plan.pool_of(r)) for r in plan.ranks] if plan else []
    known = {each.uid: each for each in (*departed, *named)}
    ends = _new_ends(workers, known.values(), answered, before)
    counted = ends if counting else ends.uncounted()
    # A later time is of a clock that was ahead: the next delay counts from now.
    last_s = min(now_s, seconds(status.last_failure_time))
    incidents = new_incidents(counted.failed, last_s, now_s=now_s)
    row = _row(status, ends, step=step, now_s=now_s) if counting else NO_ROW
    # The uids of ends that do not count are kept nevertheless, so that a resumed job does not count them.
    kept = {worker.pod.uid for worker in workers} | known.keys()
    returned = {worker.pod.uid for worker in workers if worker.placed}
    sentences = counted.sentences(answered)
    return Accounts(
        restarts=status.restarts + incidents,
        disruptions=status.disruptions + len(counted.disrupted),
        accounted=frozenset((before | ends.uids) - returned) & kept,
        failed=counted.failed,
        disrupted=counted.disrupted,
        lost=counted.pools,
        last_failure=sentences[-1] if sentences else status.last_failure,
        last_failure_s=now_s if incidents else last_s,
        departed=ends.gone,
        blamed=blamed(
            status.nodes_with_failures,
            workers,
            counted.failed,
            counted.lost,
            at_fault=row.node if row.on_node >= REPEATED else "",
            incident=incidents > 0,
            now_s=now_s,
        ),
        answered=tuple(answered[w.pod.uid] for w in counted.recut),
        row=row,
        state_lost=f"{counted.rest[0].pod.name}: {counted.rest[0].reason}" if counted.rest else "",
    )


def _row(status: HeteroTrainJobStatus, ends: _NewEnds, *, step: int | None, now_s: float) -> InternalDisruptions:
    names = [each.name for each in ends.gone]
    return continued(status.internal.disruptions or NO_ROW, ends.lost, names, step=step, now_s=now_s)


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
    if accounts.restarts == 0:
        return 0.0
    delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(accounts.restarts - 1, 20))
    return max(0.0, accounts.last_failure_s + delay_s - now_s)
