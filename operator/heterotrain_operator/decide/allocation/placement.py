"""From proposals to grants: who leaves where, who comes when, who may wait, and what a waiting job may keep.

The core says how many workers of a pool stand on which ground; which pod stands where is the scheduler's choice. So a
worker is moved from one ground of its pool to another only if somebody else needs its place, and nobody may come who
could take a place that is being made free for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heterotrain_core.allocate.capacity import Room
from heterotrain_core.allocate.problem import Grant, Objective, Size

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.allocation.demand import Bidder, offer_key
from heterotrain_operator.decide.allocation.node_group import Claim, Ground
from heterotrain_operator.decide.grants.grant import JobGrant
from heterotrain_operator.decide.workers.state import Worker, WorkerState


class Settlement:
    """What the proposals of one contest mean for each of its jobs.

    Args:
        bidders: the jobs.
        on: by job and pool, the grounds that it stands on.
        room: the grounds, empty.
        proposals: one for each bidder.
    """

    def __init__(
        self,
        bidders: Sequence[Bidder],
        on: Mapping[JobKey, Mapping[str, Sequence[Ground]]],
        room: Room,
        proposals: Sequence[Grant],
    ) -> None:
        self._bidders = bidders
        self._on = on
        self._room = room
        self._granted: dict[Claim, dict[str, int]] = {}
        """By claim, workers on each ground."""
        pools = [
            (bidder, proposed, pool)
            for bidder, proposed in zip(bidders, proposals, strict=True)
            for pool in bidder.spec.worker_pools
        ]
        for bidder, proposed, pool in pools:
            own = {
                ground.name: proposed.workers.get(offer_key(pool, ground.name), 0)
                for ground in self._stands(bidder, pool)
            }
            self._granted[bidder.claim(pool)] = own
            for ground in self._stands(bidder, pool):
                room.hold({(ground.name, ground.sizes[bidder.claim(pool)]): own[ground.name]})
        for bidder, proposed, pool in pools:
            if proposed.workers:
                self._stay(bidder, pool)
            else:
                self._keep(bidder, pool)
        self._lacking = {claim for bidder, _, pool in pools if self._lacks(bidder, pool, claim := bidder.claim(pool))}
        self._narrowest = self._narrowest_lacking()
        self._quiet = not any(self._moving(bidder) for bidder in bidders)

    def grant(self, bidder: Bidder, proposed: Grant) -> JobGrant:
        """Return what a job may have; the reason stays as long as the limits do."""
        pools = bidder.spec.worker_pools
        limits = {pool.name: self._limit(bidder, pool) for pool in pools}
        may_grow = sum(limits.values()) < most_workers(bidder.spec)
        return JobGrant(
            limits=limits,
            leave=frozenset(worker.pod.uid for pool in pools for worker in self._surplus(bidder, pool)),
            waits=frozenset(pool.name for pool in pools if may_grow and self._may_wait(bidder, pool, proposed)),
            short=bidder.before.short,
            dry=bidder.before.dry,
            tries=bidder.before.tries,
            reason=bidder.before.reason if bidder.before.limits == limits else _reason(bidder, proposed),
        )

    def _stands(self, bidder: Bidder, pool: WorkerPool) -> Sequence[Ground]:
        return self._on[bidder.job.key][pool.name]

    def _stay(self, bidder: Bidder, pool: WorkerPool) -> None:
        """Let workers stay where they are instead of on another ground of their pool, if nobody needs their places."""
        granted = self._granted[bidder.claim(pool)]
        placed = {ground.name: len(bidder.placed_on(pool, ground)) for ground in self._stands(bidder, pool)}
        sizes = {ground.name: ground.sizes[bidder.claim(pool)] for ground in self._stands(bidder, pool)}
        for here in granted:
            for there in granted:
                while placed[here] > granted[here] and placed[there] < granted[there]:
                    swap: dict[tuple[str, Size], int] = {(there, sizes[there]): -1, (here, sizes[here]): 1}
                    if not self._room.fits(swap):
                        break
                    self._room.hold(swap)
                    granted[here] += 1
                    granted[there] -= 1

    def _keep(self, bidder: Bidder, pool: WorkerPool) -> None:
        """Let a job that waits keep what it has as far as nobody needs it: it would only ask for it again."""
        for ground in self._stands(bidder, pool):
            one: dict[tuple[str, Size], int] = {(ground.name, ground.sizes[bidder.claim(pool)]): 1}
            for _ in bidder.placed_on(pool, ground):
                if self._room.fits(one):
                    self._room.hold(one)
                    self._granted[bidder.claim(pool)][ground.name] += 1

    def _surplus(self, bidder: Bidder, pool: WorkerPool) -> list[Worker]:
        """Return the workers of a pool that have to leave: ground by ground, the least useful."""
        granted = self._granted[bidder.claim(pool)]
        return [
            worker
            for ground in self._stands(bidder, pool)
            for worker in bidder.placed_on(pool, ground)[granted[ground.name] :]
        ]

    def _lacks(self, bidder: Bidder, pool: WorkerPool, claim: Claim) -> bool:
        return any(
            len(bidder.placed_on(pool, ground)) < self._granted[claim][ground.name]
            for ground in self._stands(bidder, pool)
        )

    def _limit(self, bidder: Bidder, pool: WorkerPool) -> int:
        """Return how many workers a pool shall have now.

        Workers of a pool that stands on several grounds may be scheduled to any of them, so they come only after those
        who have fewer to choose from; unless the job needs them before any worker of its own can leave.
        """
        stands, claim = self._stands(bidder, pool), bidder.claim(pool)
        granted = self._granted[claim]
        before_us = self._can_spare(bidder) and any(
            other != claim and breadth < len(stands)
            for ground in stands
            for breadth, other in self._narrowest[ground.name]
        )
        there = (
            min(granted[ground.name], len(bidder.placed_on(pool, ground))) if before_us else granted[ground.name]
            for ground in stands
        )
        return bidder.elsewhere(pool, stands) + sum(there)

    def _can_spare(self, bidder: Bidder) -> bool:
        """Tell whether those who stay are enough to train, or nobody trains anyway."""
        placed = sum(worker.placed for worker in bidder.workers)
        leaving = sum(len(self._surplus(bidder, pool)) for pool in bidder.spec.worker_pools)
        return not leaving or placed - leaving >= bidder.spec.elastic_policy.min_replicas

    def _narrowest_lacking(self) -> dict[str, list[tuple[int, Claim]]]:
        """Return by ground the two claims that lack workers there and have the fewest grounds to choose from.

        One of the two is another one's than whoever asks.
        """
        grounds = {ground.name: ground for stands in self._on.values() for on in stands.values() for ground in on}
        found: dict[str, list[tuple[int, Claim]]] = {name: [] for name in grounds}
        for claim in sorted(self._lacking):
            for ground in self._on[claim.job][claim.pool]:
                found[ground.name].append((self._breadth(claim), claim))
        return {name: sorted(claims)[:2] for name, claims in found.items()}

    def _breadth(self, claim: Claim) -> int:
        return len(self._on[claim.job][claim.pool])

    def _moving(self, bidder: Bidder) -> bool:
        """Tell whether workers of the job come or go by this decision: room that is made for one is for nobody else."""
        return any(worker.state is WorkerState.LEAVING for worker in bidder.workers) or any(
            bidder.claim(pool) in self._lacking or self._surplus(bidder, pool) for pool in bidder.spec.worker_pools
        )

    def _may_wait(self, bidder: Bidder, pool: WorkerPool, proposed: Grant) -> bool:
        """Tell whether workers beyond the limit may wait in a pool for nodes that may come.

        Not while room is being made for others, and not where one more would fit already: the job does not want it.
        """
        if pool.name in bidder.before.dry:
            return True
        granted = bool(proposed.workers)
        if not self._quiet or (granted and (bidder.objective is Objective.COST or proposed.in_time)):
            return False
        claim = bidder.claim(pool)
        return not granted or not any(
            self._room.fits({(ground.name, ground.sizes[claim]): 1}) for ground in self._stands(bidder, pool)
        )


def _reason(bidder: Bidder, proposed: Grant) -> str:
    dry = ", ".join(sorted(bidder.before.dry))
    return f"{proposed.reason}; {dry} gave it no node for long" if dry else proposed.reason
