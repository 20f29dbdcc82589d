"""From the core's proposals to grants: which workers leave and come where, which may wait, what a waiting job keeps.

The core decides how many workers of a pool are on which node group. Which pod goes to which node is the scheduler's
choice. So a worker leaves one node group for another of its pool only if another job needs its place. A worker comes
only if it cannot take a place that is being freed for another job.

A pod may never start, by a typo in its image. So running workers first give one place to a pool in which no worker is
ready, and the others once one is ready there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from heterotrain_core.contract.choices import Objective
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.problem import Grant, Proposal, Size

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.decide.allocation.demand import Competitor, job_pool_key
from heterotrain_operator.decide.allocation.node_group import GroupsByPool, NodeGroup, PoolKey
from heterotrain_operator.decide.grant import JobGrant, restated
from heterotrain_operator.decide.workers.state import Worker, WorkerState

_PROBE = "a first worker has to be ready there before "


class Placement:
    """The workers on each node group after all proposals of one competition.

    Args:
        competitors: the jobs.
        groups_of: by job and pool, the node groups that are open to the pool.
        capacity: capacity of the node groups.
        proposal: grants for each competitor, in the same order.
        now_s: now, in seconds since the epoch.
    """

    def __init__(
        self,
        competitors: Sequence[Competitor],
        groups_of: GroupsByPool,
        capacity: PoolCapacity,
        proposal: Proposal,
        *,
        now_s: float,
    ) -> None:
        self._now_s = now_s
        self._open_to = groups_of
        self._lowest = _lowest_priorities(competitors, groups_of)
        self._occupancy = occupancy = Occupancy(capacity)
        self._granted: dict[PoolKey, dict[str, int]] = {}
        """By pool, granted workers on each node group."""
        pools = [
            (competitor, proposed, pool)
            for competitor, proposed in zip(competitors, proposal.grants, strict=True)
            for pool in competitor.spec.worker_pools
        ]
        # 1. Take the proposals as they are.
        for competitor, proposed, pool in pools:
            own = {
                group.name: proposed.workers.get(job_pool_key(pool, group.name), 0)
                for group in self._groups_of(competitor, pool)
            }
            self._granted[competitor.pool_key(pool)] = own
            for group in self._groups_of(competitor, pool):
                occupancy.add({(group.name, group.sizes[competitor.pool_key(pool)]): own[group.name]})
        # 2. Leave workers where they are as long as no other job needs their places.
        for competitor, proposed, pool in pools:
            if proposed.workers:
                self._keep_groups(competitor, pool)
            self._keep_workers(competitor, pool, waits=not proposed.workers)
        # 3. Give a pool in which no worker is ready one place of running workers, as a probe.
        self._later: dict[PoolKey, dict[str, int]] = {}
        """By pool and job's key of it on a node group, workers that come (or leave, below 0) once probes are ready."""
        self._probe_first(pools)
        # 4. Note which pools still lack workers, and whether any worker comes or goes.
        self._lacking = {
            pool_key
            for competitor, _, pool in pools
            if self._lacks(competitor, pool, pool_key := competitor.pool_key(pool))
        }
        self._narrowest = self._narrowest_lacking()
        self._quiet = not any(self._moving(competitor) for competitor in competitors)

    def grant(self, competitor: Competitor, proposed: Grant) -> JobGrant:
        """Return a job's grant; its reason stays the same while its limits do."""
        pools = competitor.spec.worker_pools
        limits = {pool.name: self._limit(competitor, pool) for pool in pools}
        may_grow = sum(limits.values()) < most_workers(competitor.spec)
        before = competitor.before
        kept_since_s = (before.kept_since_s or self._now_s) if proposed.kept_for else None
        same = (before.limits, before.kept_since_s, before.kept_out) == (limits, kept_since_s, proposed.kept_out)
        return JobGrant(
            limits=limits,
            leave=frozenset(worker.pod.uid for pool in pools for worker in self._surplus(competitor, pool)),
            may_wait=frozenset(pool.name for pool in pools if may_grow and self._may_wait(competitor, pool, proposed)),
            short_since_s=before.short_since_s,
            exhausted=before.exhausted,
            tries=before.tries,
            later=self._postponed(competitor),
            reason=before.reason if same else self._reason(competitor, proposed, kept_since_s),
            kept_since_s=kept_since_s,
            kept_out=proposed.kept_out,
            latest_start=restated(before.latest_start, proposed.starts_within_s, now_s=self._now_s),
        )

    def _groups_of(self, competitor: Competitor, pool: WorkerPool) -> Sequence[NodeGroup]:
        return self._open_to[competitor.job.key][pool.name]

    def _keep_groups(self, competitor: Competitor, pool: WorkerPool) -> None:
        """Keep workers on their node groups instead of others of their pool, where no other job needs their places."""
        granted = self._granted[competitor.pool_key(pool)]
        placed = {group.name: len(competitor.placed_on(pool, group)) for group in self._groups_of(competitor, pool)}
        sizes = {group.name: group.sizes[competitor.pool_key(pool)] for group in self._groups_of(competitor, pool)}
        for here in granted:
            for there in granted:
                while placed[here] > granted[here] and placed[there] < granted[there]:
                    swap: dict[tuple[str, Size], int] = {(there, sizes[there]): -1, (here, sizes[here]): 1}
                    if not self._occupancy.fits(swap):
                        break
                    self._occupancy.add(swap)
                    granted[here] += 1
                    granted[there] -= 1

    def _keep_workers(self, competitor: Competitor, pool: WorkerPool, *, waits: bool) -> None:
        """Keep workers whose places no other job needs: all of a waiting job, which would only request them again.

        Of those that cannot start, one stays: it shows when the cause is gone.
        """
        granted, probes = self._granted[competitor.pool_key(pool)], 1
        for group in self._groups_of(competitor, pool):
            one: dict[tuple[str, Size], int] = {(group.name, group.sizes[competitor.pool_key(pool)]): 1}
            for worker in competitor.placed_on(pool, group)[granted[group.name] :]:
                idle = competitor.is_idle(worker)
                if (probes if idle else waits) and self._occupancy.fits(one):
                    self._occupancy.add(one)
                    granted[group.name] += 1
                    probes -= idle

    def _probe_first(self, pools: Sequence[tuple[Competitor, Grant, WorkerPool]]) -> None:
        """Leave workers of other jobs in the places that pools without a ready worker would get beyond the first one.

        Places that are free now cost nobody a worker, so they may be taken at once.
        """
        now, released = Occupancy(self._occupancy.capacity), set()
        for competitor, _, pool in pools:
            for group in self._groups_of(competitor, pool):
                here = len(competitor.placed_on(pool, group))
                now.add({(group.name, group.sizes[competitor.pool_key(pool)]): here})
        for competitor, _, pool in sorted(pools, key=lambda each: not _proven(each[0], each[2])):
            pool_key, probes = competitor.pool_key(pool), 0 if _places(competitor, pool) else 1
            granted, late = self._granted[pool_key], []
            for group in self._groups_of(competitor, pool):
                size, growth = group.sizes[pool_key], granted[group.name] - len(competitor.placed_on(pool, group))
                free = now.free_slots(group.name, size, max(0, growth))
                now.add({(group.name, size): free})
                probes -= min(probes, free)
                late.append((group, size, growth - free))
            for group, size, growth in () if _proven(competitor, pool) else late:
                if (waiting := growth - probes) > 0:
                    probes = 0
                    granted[group.name] -= waiting
                    self._occupancy.add({(group.name, size): -waiting})
                    self._postpone(competitor, pool, group, waiting)
                    released.add(group.name)
                elif growth > 0:
                    probes -= growth
        for competitor, proposed, pool in pools:
            if released and competitor.spec.objective is not Objective.COST and not proposed.in_time:
                self._stay(competitor, pool, released)

    def _stay(self, competitor: Competitor, pool: WorkerPool, released: Collection[str]) -> None:
        """Keep workers of a running job in places that were released in these node groups."""
        granted = self._granted[pool_key := competitor.pool_key(pool)]
        for group in self._groups_of(competitor, pool):
            one: dict[tuple[str, Size], int] = {(group.name, group.sizes[pool_key]): 1}
            for worker in competitor.placed_on(pool, group)[granted[group.name] :] if group.name in released else ():
                if not competitor.is_idle(worker) and self._occupancy.fits(one):
                    self._occupancy.add(one)
                    granted[group.name] += 1
                    self._postpone(competitor, pool, group, -1)

    def _postpone(self, competitor: Competitor, pool: WorkerPool, group: NodeGroup, workers: int) -> None:
        own, key = self._later.setdefault(competitor.pool_key(pool), {}), job_pool_key(pool, group.name)
        own[key] = own.get(key, 0) + workers

    def _surplus(self, competitor: Competitor, pool: WorkerPool) -> list[Worker]:
        """Return the workers of a pool that have to leave: by node group, those that are not ready first."""
        granted = self._granted[competitor.pool_key(pool)]
        return [
            worker
            for group in self._groups_of(competitor, pool)
            for worker in competitor.placed_on(pool, group)[granted[group.name] :]
        ]

    def _lacks(self, competitor: Competitor, pool: WorkerPool, pool_key: PoolKey) -> bool:
        return any(
            len(competitor.placed_on(pool, group)) < self._granted[pool_key][group.name]
            for group in self._groups_of(competitor, pool)
        )

    def _limit(self, competitor: Competitor, pool: WorkerPool) -> int:
        """Return how many workers a pool may have now.

        The scheduler may place workers on any node group of their pool. So they come only after the workers of pools
        with fewer node groups, unless the job needs them before any of its own workers can leave.
        """
        groups = self._groups_of(competitor, pool)
        granted = self._granted[pool_key := competitor.pool_key(pool)]
        others_first = self._can_spare(competitor) and any(
            other != pool_key and breadth < len(groups)
            for group in groups
            for breadth, other in self._narrowest[group.name]
        )
        there = (
            min(granted[group.name], len(competitor.placed_on(pool, group))) if others_first else granted[group.name]
            for group in groups
        )
        return competitor.placed_outside(pool, groups) + sum(there)

    def _can_spare(self, competitor: Competitor) -> bool:
        """Return whether no worker leaves, or the staying ones are enough to train."""
        placed = sum(worker.placed for worker in competitor.workers)
        leaving = sum(len(self._surplus(competitor, pool)) for pool in competitor.spec.worker_pools)
        return not leaving or placed - leaving >= competitor.spec.elastic_policy.min_replicas

    def _narrowest_lacking(self) -> dict[str, list[tuple[int, PoolKey]]]:
        """Return by node group the two pools that lack workers there and have the fewest node groups.

        At least one of the two differs from any pool that is compared with them.
        """
        names = {group.name for pools in self._open_to.values() for groups in pools.values() for group in groups}
        found: dict[str, list[tuple[int, PoolKey]]] = {name: [] for name in names}
        for pool_key in sorted(self._lacking):
            for group in self._open_to[pool_key.job][pool_key.pool]:
                found[group.name].append((self._breadth(pool_key), pool_key))
        return {name: sorted(pool_keys)[:2] for name, pool_keys in found.items()}

    def _breadth(self, pool_key: PoolKey) -> int:
        return len(self._open_to[pool_key.job][pool_key.pool])

    def _moving(self, competitor: Competitor) -> bool:
        """Return whether workers of the job come or go by this decision, so that its room is reserved for them."""
        return any(worker.state is WorkerState.LEAVING for worker in competitor.workers) or any(
            competitor.pool_key(pool) in self._lacking or self._surplus(competitor, pool)
            for pool in competitor.spec.worker_pools
        )

    def _may_wait(self, competitor: Competitor, pool: WorkerPool, proposed: Grant) -> bool:
        """Return whether workers beyond the limit may wait in a pool for new nodes.

        They may not while room is being made for other jobs, nor where one more would fit already: the job does not
        want it there. Nor may they where workers of a lower priority are: the scheduler would end these for them.
        """
        if proposed.kept_out:
            return False  # a waiting worker would take a node that is kept for another job
        if (exhausted := competitor.before.exhausted.get(pool.name)) is not None:
            return not exhausted.why
        granted = bool(proposed.workers)
        groups = self._groups_of(competitor, pool)
        if granted and any(self._lowest.get(group.name, competitor.priority) < competitor.priority for group in groups):
            return False
        if not self._quiet or (granted and (competitor.spec.objective is Objective.COST or proposed.in_time)):
            return False
        return not granted or not any(
            self._occupancy.fits({(group.name, group.sizes[competitor.pool_key(pool)]): 1}) for group in groups
        )

    def _postponed(self, competitor: Competitor) -> dict[str, int]:
        found: dict[str, int] = {}
        for pool in competitor.spec.worker_pools:
            found |= self._later.get(competitor.pool_key(pool), {})
        return found

    def _reason(self, competitor: Competitor, proposed: Grant, kept_since_s: float | None) -> str:
        exhausted = ", ".join(sorted(name for name, each in competitor.before.exhausted.items() if not each.why))
        later = sum(map(abs, self._postponed(competitor).values()))
        if competitor.before.later and not later and not proposed.changed:
            return competitor.before.reason.partition(f"; {_PROBE}")[0]  # the rest of that change
        parts = (
            proposed.reason,
            f"nodes are kept for it since {rfc3339(kept_since_s)}" if kept_since_s is not None else "",
            f"pools without free nodes: {exhausted}" if exhausted else "",
            f"{_PROBE}{later} of these" if later else "",
        )
        return "; ".join(filter(None, parts))


def _places(competitor: Competitor, pool: WorkerPool) -> int:
    return sum(worker.placed and worker.pod.pool == pool.name for worker in competitor.workers)


def _proven(competitor: Competitor, pool: WorkerPool) -> bool:
    """Return whether a pool's workers start: one is ready, or none can be before all of them have nodes."""
    ready = any(w.state is WorkerState.READY and w.pod.pool == pool.name for w in competitor.workers)
    return ready or competitor.all_at_once


def _lowest_priorities(competitors: Sequence[Competitor], groups_of: GroupsByPool) -> dict[str, int]:
    """Return the lowest priority of the workers on each node group, where there are any."""
    lowest: dict[str, int] = {}
    for competitor in competitors:
        for pool in competitor.spec.worker_pools:
            for group in groups_of[competitor.job.key][pool.name]:
                if competitor.placed_on(pool, group):
                    lowest[group.name] = min(lowest.get(group.name, competitor.priority), competitor.priority)
    return lowest
