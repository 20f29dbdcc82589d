"""The members of the next generation and the drain list, from the workers and the plan in force.

A loss counts at once. Joining workers are gathered for a short time, because every new generation makes all members
pause: ready workers wait for those that are about to be ready, but never longer than the gathering time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.decide.waits import left_s
from heterotrain_operator.decide.workers.state import Worker, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipDecision:
    """The workers of the next generation, if there is to be one.

    Attributes:
        workers: members of a new generation by rank order; ``None`` keeps the generation in force.
        drain: pod names of members that are about to leave.
        lost: uids of members that are gone.
        reason: what changed, in one sentence; empty when nothing did.
        again_s: seconds after which to decide again although nothing changes; ``None`` for never.
        spares: pod names of ready workers that are in no member and stay so until the membership changes.
        unchanged: the members in force and the spares, by rank order, where none of them comes or goes; else empty.
    """

    workers: tuple[Worker, ...] | None
    drain: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    reason: str = ""
    again_s: float | None = None
    spares: tuple[str, ...] = ()
    unchanged: tuple[Worker, ...] = ()

    @property
    def is_forced(self) -> bool:
        """Whether the members in force cannot stay as they are, whatever a change costs."""
        return bool(self.lost or self.drain)


def decide_membership(
    spec: HeteroTrainJobSpec, workers: Sequence[Worker], plan: Plan | None, *, gather_s: float, now_s: float
) -> MembershipDecision:
    """Return which workers should take part.

    Args:
        spec: the job's spec, for its minimums.
        workers: all workers of the job.
        plan: the plan in force; ``None`` without a readable one.
        gather_s: longest time for which a ready worker waits for starting ones.
        now_s: now.
    """
    # 1. Compare the members of the plan with the workers: who stays, who leaves, who is gone, who could join.
    by_uid = {worker.pod.uid: worker for worker in workers}
    names = {rank.worker_uid: rank.worker for rank in plan.ranks} if plan else {}
    staying = [by_uid[uid] for uid in names if uid in by_uid and by_uid[uid].placed]
    leaving = [by_uid[uid] for uid in names if uid in by_uid and by_uid[uid].state is WorkerState.LEAVING]
    gone = tuple(uid for uid in names if not _is_there(by_uid.get(uid)))
    others = [w for w in workers if w.state is WorkerState.READY and w.pod.address and w.pod.uid not in names]
    resting_names = frozenset(plan.spares if plan is not None else ())
    spares = [worker for worker in others if worker.pod.name in resting_names]
    joiners = [worker for worker in others if worker.pod.name not in resting_names]
    resting = tuple(sorted(worker.pod.name for worker in spares))
    drain = tuple(worker.pod.name for worker in leaving)
    draining = f"{_names(leaving)} will leave: {leaving[0].reason}" if leaving else ""

    # 2. Keep the generation if too few workers would take part, or if nothing changes.
    candidates = sorted([*staying, *joiners, *spares], key=lambda worker: (not worker.pod.on_demand, worker.pod.index))
    # The minimum counts members, and how many workers form one is only known once they are planned.
    planned = spec.parallelism.is_planned
    needed = 1 if planned else spec.elastic_policy.min_replicas
    starting = not (staying or leaving)
    if len(candidates) < needed or (starting and _pool_short(spec, candidates)):
        return MembershipDecision(workers=None, drain=drain, lost=gone, reason=draining, spares=resting)
    # Members of several workers are planned again while the leaving ones still train. Those of one go on by themselves.
    recut = planned and bool(leaving)
    if not gone and not joiners and not recut and plan is not None:
        unchanged = () if leaving else tuple(candidates)
        return MembershipDecision(workers=None, drain=drain, reason=draining, spares=resting, unchanged=unchanged)
    # 3. Before the start, and while no member is missing, wait for workers that are about to be ready.
    wait_s = _gathering(workers, joiners, needed=needed if starting else 1, gather_s=gather_s, now_s=now_s)
    if wait_s and (starting or not (gone or recut)):
        return MembershipDecision(workers=None, drain=drain, lost=gone, reason=draining, again_s=wait_s, spares=resting)
    # 4. Otherwise make a new generation of all candidates.
    lost = [by_uid[uid] for uid in gone if uid in by_uid]
    why = f": {lost[0].reason}" if lost and lost[0].reason else ""
    changes = (
        draining if recut else "",
        f"without {', '.join(sorted(names[uid] for uid in gone))}{why}" if gone else "",
        f"with {_names(joiners)}" if joiners else "",
    )
    return MembershipDecision(
        workers=tuple(candidates),
        drain=drain,
        lost=gone,
        reason="; ".join(filter(None, changes)) or "the plan was written again",
        spares=resting,
    )


def _is_there(worker: Worker | None) -> bool:
    """Return whether a member still trains, as far as is known."""
    return worker is not None and (worker.placed or worker.state is WorkerState.LEAVING)


def _pool_short(spec: HeteroTrainJobSpec, candidates: Sequence[Worker]) -> bool:
    return any(sum(w.pod.pool == pool.name for w in candidates) < pool.min_replicas for pool in spec.worker_pools)


def _gathering(
    workers: Sequence[Worker], joiners: Sequence[Worker], *, needed: int, gather_s: float, now_s: float
) -> float:
    """Return for how many more seconds joining workers should wait for starting ones; 0 when they should not."""
    if not joiners or not any(
        worker.state is WorkerState.STARTING and not worker.pod.waiting_reason for worker in workers
    ):
        return 0.0
    since_s = sorted(worker.pod.ready_since_s for worker in joiners)[min(needed, len(joiners)) - 1]
    return left_s(since_s, gather_s, now_s=now_s)


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(sorted(worker.pod.name for worker in workers))
