"""From proposals to grants: who leaves where, who comes when, who may wait, and what a waiting job may keep.

The core says how many workers of a pool stand on which node group; which pod stands where is the scheduler's choice. So a
worker is moved from one node group of its pool to another only if somebody else needs its place, and nobody may come who
could take a place that is being made free for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heterotrain_core.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_core.allocate.problem import Grant, Objective, Size

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.allocation.demand import Competitor, option_key
from heterotrain_operator.decide.allocation.node_group import NodeGroup, PoolKey
from heterotrain_operator.decide.grants.grant import JobGrant
from heterotrain_operator.decide.workers.state import Worker, WorkerState


class Placement:
    """What the proposals of one competition mean for each of its jobs.

    Args:
        competitors: the jobs.
        on: by job and pool, the node groups that it stands on.
        capacity: of the node groups.
        proposals: one for each competitor.
    """

    def __init__(
        self,
        competitors: Sequence[Competitor],
        on: Mapping[JobKey, Mapping[str, Sequence[NodeGroup]]],
        capacity: PoolCapacity,
        proposals: Sequence[Grant],
    ) -> None:
        self._bidders = competitors
        self._on = on
        self._occupancy = occupancy = Occupancy(capacity)
        self._granted: dict[PoolKey, dict[str, int]] = {}
        """By pool, workers on each node group."""
        pools = [
            (competitor, proposed, pool)
            for competitor, proposed in zip(competitors, proposals, strict=True)
            for pool in competitor.spec.worker_pools
        ]
        for competitor, proposed, pool in pools:
            own = {
                group.name: proposed.workers.get(option_key(pool, group.name), 0)
                for group in self._groups_of(competitor, pool)
            }
            self._granted[competitor.pool_key(pool)] = own
            for group in self._groups_of(competitor, pool):
                occupancy.add({(group.name, group.sizes[competitor.pool_key(pool)]): own[group.name]})
        for competitor, proposed, pool in pools:
            if proposed.workers:
                self._stay(competitor, pool)
            else:
                self._keep(competitor, pool)
        self._lacking = {
            pool_key
            for competitor, _, pool in pools
            if self._lacks(competitor, pool, pool_key := competitor.pool_key(pool))
        }
        self._narrowest = self._narrowest_lacking()
        self._quiet = not any(self._moving(competitor) for competitor in competitors)

    def grant(self, competitor: Competitor, proposed: Grant) -> JobGrant:
        """Return what a job may have; the reason stays as long as the limits do."""
        pools = competitor.spec.worker_pools
        limits = {pool.name: self._limit(competitor, pool) for pool in pools}
        may_grow = sum(limits.values()) < most_workers(competitor.spec)
        return JobGrant(
            limits=limits,
            leave=frozenset(worker.pod.uid for pool in pools for worker in self._surplus(competitor, pool)),
            may_wait=frozenset(pool.name for pool in pools if may_grow and self._may_wait(competitor, pool, proposed)),
            short_since_s=competitor.before.short_since_s,
            exhausted=competitor.before.exhausted,
            tries=competitor.before.tries,
            reason=competitor.before.reason if competitor.before.limits == limits else _reason(competitor, proposed),
        )

    def _groups_of(self, competitor: Competitor, pool: WorkerPool) -> Sequence[NodeGroup]:
        return self._on[competitor.job.key][pool.name]

    def _stay(self, competitor: Competitor, pool: WorkerPool) -> None:
        """Let workers stay where they are instead of on another node group of their pool, if nobody needs their places."""
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

    def _keep(self, competitor: Competitor, pool: WorkerPool) -> None:
        """Let a job that waits keep what it has as far as nobody needs it: it would only ask for it again."""
        for group in self._groups_of(competitor, pool):
            one: dict[tuple[str, Size], int] = {(group.name, group.sizes[competitor.pool_key(pool)]): 1}
            for _ in competitor.placed_on(pool, group):
                if self._occupancy.fits(one):
                    self._occupancy.add(one)
                    self._granted[competitor.pool_key(pool)][group.name] += 1

    def _surplus(self, competitor: Competitor, pool: WorkerPool) -> list[Worker]:
        """Return the workers of a pool that have to leave: node group by node group, the least useful."""
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
        """Return how many workers a pool shall have now.

        Workers of a pool that stands on several node groups may be scheduled to any of them, so they come only after those
        who have fewer to choose from; unless the job needs them before any worker of its own can leave.
        """
        groups, pool_key = self._groups_of(competitor, pool), competitor.pool_key(pool)
        granted = self._granted[pool_key]
        before_us = self._can_spare(competitor) and any(
            other != pool_key and breadth < len(groups)
            for group in groups
            for breadth, other in self._narrowest[group.name]
        )
        there = (
            min(granted[group.name], len(competitor.placed_on(pool, group))) if before_us else granted[group.name]
            for group in groups
        )
        return competitor.placed_outside(pool, groups) + sum(there)

    def _can_spare(self, competitor: Competitor) -> bool:
        """Tell whether those who stay are enough to train, or nobody trains anyway."""
        placed = sum(worker.placed for worker in competitor.workers)
        leaving = sum(len(self._surplus(competitor, pool)) for pool in competitor.spec.worker_pools)
        return not leaving or placed - leaving >= competitor.spec.elastic_policy.min_replicas

    def _narrowest_lacking(self) -> dict[str, list[tuple[int, PoolKey]]]:
        """Return by node group the two pools that lack workers there and have the fewest node groups to choose from.

        One of the two is another one's than whoever asks.
        """
        node_groups = {group.name: group for groups in self._on.values() for on in groups.values() for group in on}
        found: dict[str, list[tuple[int, PoolKey]]] = {name: [] for name in node_groups}
        for pool_key in sorted(self._lacking):
            for group in self._on[pool_key.job][pool_key.pool]:
                found[group.name].append((self._breadth(pool_key), pool_key))
        return {name: sorted(pool_keys)[:2] for name, pool_keys in found.items()}

    def _breadth(self, pool_key: PoolKey) -> int:
        return len(self._on[pool_key.job][pool_key.pool])

    def _moving(self, competitor: Competitor) -> bool:
        """Tell whether workers of the job come or go by this decision: room that is made for one is for nobody else."""
        return any(worker.state is WorkerState.LEAVING for worker in competitor.workers) or any(
            competitor.pool_key(pool) in self._lacking or self._surplus(competitor, pool)
            for pool in competitor.spec.worker_pools
        )

    def _may_wait(self, competitor: Competitor, pool: WorkerPool, proposed: Grant) -> bool:
        """Tell whether workers beyond the limit may wait in a pool for nodes that may come.

        Not while room is being made for others, and not where one more would fit already: the job does not want it.
        """
        if pool.name in competitor.before.exhausted:
            return True
        granted = bool(proposed.workers)
        if not self._quiet or (granted and (competitor.spec.objective is Objective.COST or proposed.in_time)):
            return False
        pool_key = competitor.pool_key(pool)
        return not granted or not any(
            self._occupancy.fits({(group.name, group.sizes[pool_key]): 1})
            for group in self._groups_of(competitor, pool)
        )


def _reason(competitor: Competitor, proposed: Grant) -> str:
    exhausted = ", ".join(sorted(competitor.before.exhausted))
    return f"{proposed.reason}; {exhausted} gave it no node for long" if exhausted else proposed.reason
