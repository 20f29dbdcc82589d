"""How many workers each pool should have now: what fits, never less than the minimum, and no worker that waits in vain.

A worker that has no node delays nothing, so it is harmless to keep one per pool waiting: the scheduler places it the
moment room appears, and a cluster autoscaler sees that a node would be welcome. More than that would only be noise.

Where other jobs want the same nodes, what fits is not ours to take: then the job has what the allocation allots to it,
and whoever waits for more waits only where he takes nothing that is being made free for another job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.grants.grant import UNLIMITED, JobGrant
from heterotrain_operator.decide.workers.capacity import FreeSlots
from heterotrain_operator.decide.workers.state import Worker, WorkerState

WAITING_PER_POOL = 1
"""Workers without a node that are kept in each pool beyond what fits."""
UNSCHEDULABLE_S = 10.0
"""A waiting worker too many is removed only after this long: the scheduler may just be about to place it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDecision:
    """What to do about the number of workers.

    Attributes:
        create: for each worker to create, its pool; in order of preference.
        remove: workers that are too many, with the reason.
        desired: by pool, workers that should exist now.
        reason: what limits the number, in one sentence; empty when every pool is full.
        again_s: seconds after which to decide again although nothing changes; ``None`` for never.
    """

    create: tuple[WorkerPool, ...]
    remove: tuple[tuple[Worker, str], ...]
    desired: dict[str, int]
    reason: str
    again_s: float | None


def decide_replicas(
    spec: HeteroTrainJobSpec,
    workers: Sequence[Worker],
    *,
    grant: JobGrant = UNLIMITED,
    free_slots_of: Callable[[WorkerPool], FreeSlots],
    now_s: float,
) -> ReplicaDecision:
    """Return how many workers each pool should have, and the way there.

    Args:
        spec: what the user wants; pools in order of preference.
        workers: all workers of the job.
        grant: what the job may have of nodes that others want, too.
        free_slots_of: how many more workers of a pool fit on the nodes; asked only for pools that may grow.
        now_s: now.
    """
    alive = [worker for worker in workers if worker.alive]
    names = {pool.name for pool in spec.worker_pools}
    remove = [(worker, "its pool is not in the spec any more") for worker in alive if worker.pod.pool not in names]
    leaving = {worker.pod.uid: worker for worker in alive if worker.pod.uid in grant.leave}
    keep: dict[str, list[Worker]] = {}
    for pool in spec.worker_pools:
        own = sorted((w for w in alive if w.pod.pool == pool.name and w.pod.uid not in leaving), key=_keep_order)
        keep[pool.name] = own[: pool.max_replicas]
        remove += [(worker, f"pool {pool.name} may have {pool.max_replicas}") for worker in own[pool.max_replicas :]]

    most = most_workers(spec)
    schedulable = {name: [w for w in own if not _is_unschedulable(w)] for name, own in keep.items()}
    unschedulable = {name: [w for w in own if _is_unschedulable(w)] for name, own in keep.items()}
    for pool in reversed(spec.worker_pools):
        while sum(map(len, schedulable.values())) > most and len(schedulable[pool.name]) > pool.min_replicas:
            remove.append((schedulable[pool.name].pop(), f"the job may have {most} workers"))

    short = _Shortage()
    if grant.undecided:
        count = {pool.name: len(keep[pool.name]) for pool in spec.worker_pools}
    elif grant.limits is None:
        count = _what_fits(spec, schedulable, unschedulable, free_slots_of=free_slots_of, short=short)
    else:
        placed = {name: sum(worker.placed for worker in own) for name, own in keep.items()}
        count = {name: max(grant.limits.get(name, 0), placed[name]) for name in keep}
    asking = [pool for pool in spec.worker_pools if grant.limits is None or pool.name in grant.may_wait]
    if not grant.undecided:
        _ask_for_more(spec, asking, count, schedulable)

    create: list[WorkerPool] = []
    again_s: float | None = None
    for pool in spec.worker_pools:
        while grant.limits is not None and len(schedulable[pool.name]) > count[pool.name]:
            remove.append((schedulable[pool.name].pop(), grant.reason))  # it has no node: the placed ones come first
        gap = count[pool.name] - len(schedulable[pool.name])
        create += [pool] * max(0, gap - len(unschedulable[pool.name]))
        for worker in unschedulable[pool.name][max(0, gap) :]:
            left_s = worker.pod.unschedulable_since_s + UNSCHEDULABLE_S - now_s
            if grant.limits is not None and pool.name not in grant.may_wait:
                remove.append((worker, grant.reason))  # it might take what is being made free for another job
            elif left_s <= 0:
                remove.append((worker, f"it waits in vain for a node: {worker.reason}"))
            else:
                again_s = left_s if again_s is None else min(again_s, left_s)
        if unschedulable[pool.name]:
            short.unschedulable(pool, free_slots_of(pool), unschedulable[pool.name][0])
    if leaving and not _replaced_soon(spec, [w for w in alive if w.pod.uid not in leaving], create):
        remove += [(worker, grant.reason) for worker in leaving.values()]
    return ReplicaDecision(
        create=tuple(create),
        remove=tuple(remove),
        desired=count,
        reason="; ".join(filter(None, (grant.reason, short.sentence()))),
        again_s=again_s,
    )


def _replaced_soon(spec: HeteroTrainJobSpec, staying: Sequence[Worker], create: Sequence[WorkerPool]) -> bool:
    """Tell whether those who stay are too few to train, but others are about to be ready: then nobody leaves yet."""
    if sum(worker.state is WorkerState.READY for worker in staying) >= spec.elastic_policy.min_replicas:
        return False
    return bool(create) or any(
        (worker.state is WorkerState.WAITING and not _is_unschedulable(worker))
        or (worker.state is WorkerState.STARTING and not worker.pod.waiting_reason)
        for worker in staying
    )


def _what_fits(
    spec: HeteroTrainJobSpec,
    schedulable: Mapping[str, Sequence[Worker]],
    unschedulable: Mapping[str, Sequence[Worker]],
    *,
    free_slots_of: Callable[[WorkerPool], FreeSlots],
    short: _Shortage,
) -> dict[str, int]:
    """Return by pool the workers that there are and those that fit beside them, up to the job's limits."""
    most = most_workers(spec)
    count = {name: len(own) for name, own in schedulable.items()}
    for pool in spec.worker_pools:
        spare = min(pool.max_replicas, most) - count[pool.name]
        wish = min(spare, most - sum(count.values()))
        if wish <= 0 or unschedulable[pool.name]:
            continue
        free_slots = free_slots_of(pool)
        waiting = sum(
            w.state is WorkerState.WAITING for w in schedulable[pool.name]
        )  # they will take room that still looks free
        count[pool.name] += min(wish, max(0, free_slots.slots - waiting))
        short.note(pool, free_slots, wanted=pool.max_replicas - count[pool.name])
    return count


def _ask_for_more(
    spec: HeteroTrainJobSpec,
    pools: Sequence[WorkerPool],
    count: dict[str, int],
    schedulable: Mapping[str, Sequence[Worker]],
) -> None:
    """Raise the counts of these pools to the minimums, whether they fit or not (an autoscaler may help), and by one that waits."""
    for pool in pools:
        count[pool.name] = max(count[pool.name], pool.min_replicas)
    for pool in pools:
        missing = spec.elastic_policy.min_replicas - sum(count.values())
        count[pool.name] += max(0, min(missing, pool.max_replicas - count[pool.name]))
    for pool in pools:
        waiting = (
            count[pool.name]
            - len(schedulable[pool.name])
            + sum(w.state is WorkerState.WAITING for w in schedulable[pool.name])
        )
        room_left = count[pool.name] < pool.max_replicas and sum(count.values()) < most_workers(spec)
        if waiting < WAITING_PER_POOL and room_left:
            count[pool.name] += 1


def next_indices(pods: Iterable[PodView], count: int) -> tuple[int, ...]:
    """Return the lowest worker indices that no pod has; ended, terminating and foreign ones have theirs, too."""
    taken = {pod.index for pod in pods}
    free: list[int] = []
    index = 0
    while len(free) < count:
        if index not in taken:
            free.append(index)
        index += 1
    return tuple(free)


def _is_unschedulable(worker: Worker) -> bool:
    return worker.state is WorkerState.WAITING and bool(worker.pod.unschedulable)


def _keep_order(worker: Worker) -> tuple[int, int]:
    """Order workers by how far they are, then by age: the last ones are the first to go."""
    order = {WorkerState.READY: 0, WorkerState.STARTING: 1, WorkerState.WAITING: 2}
    return (order[worker.state], worker.pod.index)


class _Shortage:
    """Collects, by pool, why no more workers fit."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def note(self, pool: WorkerPool, free_slots: FreeSlots, *, wanted: int) -> None:
        if wanted > 0:
            self._said[pool.name] = _impossible(pool, free_slots) or f"pool {pool.name} has no more room"

    def unschedulable(self, pool: WorkerPool, free_slots: FreeSlots, worker: Worker) -> None:
        self._said[pool.name] = _impossible(pool, free_slots) or f"pool {pool.name}: {worker.pod.unschedulable}"

    def sentence(self) -> str:
        return "; ".join(self._said.values())


def _impossible(pool: WorkerPool, free_slots: FreeSlots) -> str:
    """Return why waiting alone will not help; empty when it may."""
    if free_slots.matching_nodes == 0:
        return f"pool {pool.name} has no node that matches and is ready"
    if not free_slots.possible:
        return f"no node of pool {pool.name} is large enough for a worker: lower resources.requests"
    return ""
