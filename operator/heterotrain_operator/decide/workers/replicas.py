"""Decides how many workers each pool should have: as many as fit, at least the minimum, and a few that wait for a node.

A worker without a node delays nothing. One per pool may therefore wait: the scheduler places it as soon as there is
room, and a cluster autoscaler sees the demand for a node. Once nodes came for workers that had waited, more of them may
wait: one more than came, so 1, 2, 4, 8. Where none comes, more waiting workers would add nothing. The
same holds for workers on nodes that cannot start, by a typo in their image: one of them shows when the cause is gone.

When jobs compete for the same nodes, this job gets only its allocated workers. It may keep a waiting worker beyond that
only where the worker cannot take capacity that is being freed for another job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.grant import UNLIMITED, JobGrant
from heterotrain_operator.decide.waits import left_s
from heterotrain_operator.decide.workers.capacity import FreeSlots
from heterotrain_operator.decide.workers.state import Worker, WorkerState

WAITING_PER_POOL = 1
"""Workers without a node that are kept in each pool beyond those that fit, and beyond one for each that got a node."""
MOST_WAITING = 64
ARRIVED_S = 600.0
"""A node that came for a waiting worker counts for so long."""
UNSCHEDULABLE_S = 10.0
"""A surplus waiting worker is removed only after this long: the scheduler may be about to place it."""
CANNOT_START_S = 60.0
"""The same for one that has a node and cannot start: a registry may be busy for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDecision:
    """How the number of workers should change.

    Attributes:
        create: the pool of each worker to create, in order of preference.
        remove: surplus workers, each with the reason.
        desired: by pool, workers that should exist now.
        reason: what limits the number, in one sentence; empty when every pool is full.
        again_s: seconds after which to decide again although nothing changes; ``None`` for never.
    """

    create: tuple[WorkerPool, ...]
    remove: tuple[tuple[Worker, str], ...]
    desired: Mapping[str, int]
    reason: str
    again_s: float | None


NO_REPLICAS = ReplicaDecision(create=(), remove=(), desired={}, reason="", again_s=None)
"""For a job that gets no workers now."""


def same_replicas(spec: HeteroTrainJobSpec, workers: Sequence[Worker]) -> ReplicaDecision:
    """Return the decision to keep the workers that there are."""
    number = Counter(worker.pod.pool for worker in workers if worker.alive)
    return replace(NO_REPLICAS, desired={pool.name: number[pool.name] for pool in spec.worker_pools})


def decide_replicas(
    spec: HeteroTrainJobSpec,
    workers: Sequence[Worker],
    *,
    grant: JobGrant = UNLIMITED,
    free_slots_of: Callable[[WorkerPool], FreeSlots],
    now_s: float,
) -> ReplicaDecision:
    """Return how many workers each pool should have, and the changes that lead there.

    Args:
        spec: the job's spec; its pools are in order of preference.
        workers: all workers of the job.
        grant: what the job may use of nodes that other jobs want, too.
        free_slots_of: how many more workers of a pool fit on the nodes; called only for pools that may grow.
        now_s: now.
    """
    # 1. Remove the workers that have no place: those of unknown pools, and those above a maximum.
    kept = _kept(spec, workers, leave=grant.leave)
    halted = {name: each for name, each in grant.exhausted.items() if each.why}
    shortage = _Shortage()

    # 2. Count the workers that each pool should have.
    count = _counted(spec, kept, grant, halted, free_slots_of=free_slots_of, shortage=shortage, now_s=now_s)

    # 3. Create what is missing in each pool, and remove surplus workers that have no node.
    create: list[WorkerPool] = []
    remove = list(kept.remove)
    waits_s: list[float] = []
    for pool in spec.worker_pools:
        name = pool.name
        while grant.limits is not None and len(kept.schedulable[name]) > count[name]:
            remove.append((kept.schedulable[name].pop(), grant.reason))  # it has no node: placed workers sort first
        gap = count[name] - len(kept.schedulable[name])
        create += [pool] * max(0, gap - len(kept.idle[name]))
        gone, more_s = _surplus(kept.idle[name][max(0, gap) :], pool, grant, now_s=now_s)
        remove += gone
        waits_s += more_s
        if kept.idle[name]:
            shortage.unschedulable(pool, free_slots_of(pool), kept.idle[name][0])
    shortage.halted({name: each.why for name, each in halted.items() if not kept.idle.get(name)})

    # 4. Let workers go that the allocation takes away, unless the job would stop just before their replacements start.
    if kept.leaving and not _replaced_soon(spec, kept.staying, create):
        remove += [(worker, grant.reason) for worker in kept.leaving]
    return ReplicaDecision(
        create=tuple(create),
        remove=tuple(remove),
        desired=count,
        reason="; ".join(filter(None, (grant.reason, shortage.sentence()))),
        again_s=min(waits_s, default=None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The living workers of a job, sorted by what becomes of them.

    Attributes:
        staying: those that the allocation leaves to the job.
        leaving: the others.
        by_pool: of those that stay, by pool and in the order in which they are kept, those that have a place.
        idle: of these, those that find no node or cannot start on theirs.
        schedulable: the rest of these, without those above the job's maximum.
        remove: surplus workers, each with the reason.
    """

    staying: Sequence[Worker]
    leaving: Sequence[Worker]
    by_pool: Mapping[str, Sequence[Worker]]
    idle: Mapping[str, list[Worker]]
    schedulable: Mapping[str, list[Worker]]
    remove: Sequence[tuple[Worker, str]]


def _kept(spec: HeteroTrainJobSpec, workers: Sequence[Worker], *, leave: Collection[str]) -> _Kept:
    """Return the living workers; those above the job's maximum go from the least preferred pool first."""
    alive = [worker for worker in workers if worker.alive]
    names = {pool.name for pool in spec.worker_pools}
    remove = [(worker, "its pool is not in the spec any more") for worker in alive if worker.pod.pool not in names]
    staying = [worker for worker in alive if worker.pod.uid not in leave]
    by_pool = _by_pool(spec, staying)
    for pool in spec.worker_pools:
        surplus = by_pool[pool.name][pool.max_replicas :]
        by_pool[pool.name] = by_pool[pool.name][: pool.max_replicas]
        remove += [(worker, f"pool {pool.name} may have {pool.max_replicas}") for worker in surplus]
    most = most_workers(spec)
    idle = {name: _idle(own) for name, own in by_pool.items()}
    schedulable = {name: [w for w in own if w not in idle[name]] for name, own in by_pool.items()}
    for pool in reversed(spec.worker_pools):
        while sum(map(len, schedulable.values())) > most and len(schedulable[pool.name]) > pool.min_replicas:
            remove.append((schedulable[pool.name].pop(), f"the job may have {most} workers"))
    return _Kept(
        staying=staying,
        leaving=[worker for worker in alive if worker.pod.uid in leave],
        by_pool=by_pool,
        idle=idle,
        schedulable=schedulable,
        remove=remove,
    )


def _counted(
    spec: HeteroTrainJobSpec,
    kept: _Kept,
    grant: JobGrant,
    halted: Collection[str],
    *,
    free_slots_of: Callable[[WorkerPool], FreeSlots],
    shortage: _Shortage,
    now_s: float,
) -> dict[str, int]:
    """Return how many workers each pool should have: by the grant or, without limits, as many as fit.

    Where the job may wait for nodes, these are at least the minimums and one waiting worker per pool.
    """
    if grant.undecided:
        return {name: len(own) for name, own in kept.by_pool.items()}
    if grant.limits is None:
        full = {name for name in kept.by_pool if kept.idle[name] or name in halted}
        count = _what_fits(spec, kept.schedulable, full, free_slots_of=free_slots_of, shortage=shortage)
        count |= {name: count[name] + 1 for name in halted if kept.idle.get(name)}
    else:
        placed = {name: sum(worker.placed for worker in own) for name, own in kept.by_pool.items()}
        count = {name: max(grant.limits.get(name, 0), placed[name]) for name in kept.by_pool}
    may_wait = [pool for pool in spec.worker_pools if grant.may_wait_in(pool.name)]
    _add_waiting(spec, may_wait, count, kept.schedulable, kept.idle, now_s=now_s)
    return count


def _surplus(
    idle: Sequence[Worker], pool: WorkerPool, grant: JobGrant, *, now_s: float
) -> tuple[list[tuple[Worker, str]], list[float]]:
    """Return which surplus workers without use go now, each with the reason, and the seconds that the others have."""
    gone, waits_s = [], []
    for worker in idle:
        wait_s, why = _surplus_wait(worker, now_s=now_s)
        if grant.limits is not None and pool.name not in grant.may_wait:
            gone.append((worker, grant.reason))  # it could take capacity that is being freed for another job
        elif not wait_s:
            gone.append((worker, f"{why}: {worker.reason}"))
        else:
            waits_s.append(wait_s)
    return gone, waits_s


def _by_pool(spec: HeteroTrainJobSpec, workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    ordered = sorted(workers, key=_keep_order)
    return {pool.name: [worker for worker in ordered if worker.pod.pool == pool.name] for pool in spec.worker_pools}


def _surplus_wait(worker: Worker, *, now_s: float) -> tuple[float, str]:
    """Return for how many seconds a surplus worker may still find a node or start there, and why it goes then."""
    if worker.placed:
        return left_s(worker.pod.scheduled_s, CANNOT_START_S, now_s=now_s), "one such worker is enough"
    return left_s(worker.pod.unschedulable_since_s, UNSCHEDULABLE_S, now_s=now_s), "no node has room for it"


def next_indices(pods: Iterable[PodView], count: int, *, taken: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Return the lowest worker indices that no pod has; ended, terminating and foreign pods count as well.

    Args:
        pods: pods with the job's labels.
        count: how many indices.
        taken: indices whose names other pods have.
    """
    taken |= {pod.index for pod in pods}
    free: list[int] = []
    index = 0
    while len(free) < count:
        if index not in taken:
            free.append(index)
        index += 1
    return tuple(free)


def _what_fits(
    spec: HeteroTrainJobSpec,
    schedulable: Mapping[str, Sequence[Worker]],
    full: Collection[str],
    *,
    free_slots_of: Callable[[WorkerPool], FreeSlots],
    shortage: _Shortage,
) -> dict[str, int]:
    """Return by pool the existing workers plus those that fit in addition, up to the job's limits; none in ``full``."""
    most = most_workers(spec)
    count = {name: len(own) for name, own in schedulable.items()}
    for pool in spec.worker_pools:
        spare = min(pool.max_replicas, most) - count[pool.name]
        wish = min(spare, most - sum(count.values()))
        if wish <= 0 or pool.name in full:
            continue
        free = free_slots_of(pool)
        # Workers that wait for the scheduler will take slots that still look free.
        waiting = sum(w.state is WorkerState.WAITING for w in schedulable[pool.name])
        count[pool.name] += min(wish, max(0, free.slots - waiting))
        shortage.note(pool, free, missing=pool.max_replicas - count[pool.name])
    return count


def _add_waiting(
    spec: HeteroTrainJobSpec,
    pools: Sequence[WorkerPool],
    count: dict[str, int],
    schedulable: Mapping[str, Sequence[Worker]],
    unschedulable: Mapping[str, Sequence[Worker]],
    *,
    now_s: float,
) -> None:
    """Raise the counts of these pools to the minimums, even where no node fits, and by the workers that may wait.

    An autoscaler may add nodes for waiting workers.
    """
    for pool in pools:
        count[pool.name] = max(count[pool.name], pool.min_replicas)
    for pool in pools:
        missing = spec.elastic_policy.min_replicas - sum(count.values())
        count[pool.name] += max(0, min(missing, pool.max_replicas - count[pool.name]))
    for pool in pools:
        own = schedulable[pool.name]
        waiting = count[pool.name] - len(own) + sum(w.state is WorkerState.WAITING for w in own)
        may_grow = min(pool.max_replicas - count[pool.name], most_workers(spec) - sum(count.values()))
        arrived = _arrived([*own, *unschedulable[pool.name]], now_s=now_s)
        wanted = min(MOST_WAITING, WAITING_PER_POOL + arrived) - waiting
        count[pool.name] += max(0, min(wanted, may_grow))


def _arrived(workers: Sequence[Worker], *, now_s: float) -> int:
    """Return how many workers got a node lately while one had waited for it, as autoscalers bring it.

    The worker that waited need not be the one that got the node: the scheduler may still hold it back when the node
    comes, and takes a younger one.
    """
    waited = [
        (worker.pod.created_s + UNSCHEDULABLE_S, worker.pod.scheduled_s if worker.placed else math.inf)
        for worker in workers
        if not worker.placed or worker.pod.scheduled_s - worker.pod.created_s >= UNSCHEDULABLE_S
    ]
    return sum(
        worker.pod.scheduled_s - worker.pod.created_s >= UNSCHEDULABLE_S
        or any(from_s <= worker.pod.scheduled_s < until_s for from_s, until_s in waited)
        for worker in workers
        if worker.placed and now_s - worker.pod.scheduled_s < ARRIVED_S
    )


def _replaced_soon(spec: HeteroTrainJobSpec, staying: Sequence[Worker], create: Sequence[WorkerPool]) -> bool:
    """Return whether the staying workers are too few to train, but more are about to be ready: then none leaves yet."""
    if sum(worker.state is WorkerState.READY for worker in staying) >= spec.elastic_policy.min_replicas:
        return False
    return bool(create) or any(
        (worker.state is WorkerState.WAITING and not _is_unschedulable(worker))
        or (worker.state is WorkerState.STARTING and not worker.pod.waiting_reason)
        for worker in staying
    )


def _is_unschedulable(worker: Worker) -> bool:
    return worker.state is WorkerState.WAITING and bool(worker.pod.unschedulable)


def _idle(own: Sequence[Worker]) -> list[Worker]:
    """Return the workers of a pool that find no node, and, where none is ready, those that cannot start on theirs."""
    starts = any(worker.state is WorkerState.READY for worker in own)
    return [worker for worker in own if _is_unschedulable(worker) or (worker.cannot_start and not starts)]


def _keep_order(worker: Worker) -> tuple[int, int]:
    """Order workers by progress towards training, then by index: the last ones are removed first."""
    order = {WorkerState.READY: 0, WorkerState.STARTING: 1, WorkerState.WAITING: 2}
    return (order[worker.state], worker.pod.index)


class _Shortage:
    """Collects by pool why no more workers fit."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def note(self, pool: WorkerPool, free: FreeSlots, *, missing: int) -> None:
        if missing > 0:
            self._reasons[pool.name] = _impossible(pool, free) or f"pool {pool.name} has no room for more workers"

    def unschedulable(self, pool: WorkerPool, free: FreeSlots, worker: Worker) -> None:
        own = f"pool {pool.name}: {worker.reason}"
        self._reasons[pool.name] = own if worker.placed else _impossible(pool, free) or own

    def halted(self, why: Mapping[str, str]) -> None:
        for name, words in why.items():
            self._reasons[name] = f"pool {name}: a worker could not start, and one is tried again later: {words}"

    def sentence(self) -> str:
        return "; ".join(self._reasons.values())


def _impossible(pool: WorkerPool, free: FreeSlots) -> str:
    """Return why waiting alone will not help; empty when that is not known."""
    if free.matching_nodes == 0:
        return f"pool {pool.name} has no matching node that is ready: check its nodeSelector, or add a node"
    if not free.possible:
        return f"no node of pool {pool.name} is large enough for a worker: lower resources.requests"
    return ""
