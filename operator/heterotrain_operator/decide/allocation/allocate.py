"""Who gets which nodes: over all jobs, from what each is worth there to the workers that each shall have.

Elastic jobs take what fits; that is right as long as nobody else wants the same nodes. Where jobs compete, the core's
allocation decides, and what it says becomes limits for each job's own pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from heterotrain_core.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_core.allocate.problem import JobDemand, Objective, Pool, Size
from heterotrain_core.allocate.propose import propose
from heterotrain_core.allocate.rate_cache import RateCache
from heterotrain_core.allocate.value import timed

from heterotrain_operator.api.pools import CapacityType
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.allocation.competition import Competition
from heterotrain_operator.decide.allocation.demand import Competitor, demand_of, throughput_of
from heterotrain_operator.decide.allocation.node_group import NodeGroup
from heterotrain_operator.decide.allocation.placement import Placement
from heterotrain_operator.decide.grants.grant import Exhausted, JobGrant, ThroughputModel
from heterotrain_operator.decide.workers.state import WorkerState

EXHAUSTED_AFTER_S = 60.0
"""A worker that was granted and has found no node for so long shows that the pool is out of stock, whatever we count."""
RETRY_S = 600.0
"""After this long a pool that was out of stock is tried again, even if no worker that waits there has found a node; twice as
long each time that it gives nothing again."""
MOST_DOUBLINGS = 6


def decide_allocation(
    competition: Competition, *, now_s: float, rate_cache: RateCache | None = None
) -> dict[JobKey, JobGrant]:
    """Return what each job of a competition may have; ``rate_cache`` keeps rates of former decisions.

    Deciding again after everybody has what he was given changes nothing. What a worker waits for in vain (``EXHAUSTED_AFTER_S``) is
    taken as out of stock until it, or another one, finds a node there.
    """
    making_room = any(
        worker.state is WorkerState.LEAVING for competitor in competition.competitors for worker in competitor.workers
    )
    watched = tuple(
        _with_exhausted_pools(competitor, making_room=making_room, now_s=now_s)
        for competitor in competition.competitors
    )
    competition = replace(competition, competitors=watched)
    throughput = {b.job.key: throughput_of(b.before.throughput, b.plan, b.telemetry) for b in competition.competitors}
    problem = problem_of(competition, throughput, now_s=now_s)
    frugal = any(demand.objective is Objective.COST or timed(demand) for demand in problem.demands)
    if not frugal and (len(competition.competitors) == 1 or _all_fit(competition, problem)):
        return {
            b.job.key: JobGrant(exhausted=b.before.exhausted, tries=b.before.tries, throughput=throughput[b.job.key])
            for b in competition.competitors
        }
    proposals = propose(problem.capacity, problem.demands, rate_cache=rate_cache).grants
    placement = Placement(competition.competitors, problem.on, problem.capacity, proposals)
    return {
        competitor.job.key: replace(
            placement.grant(competitor, proposed),
            spare_s=proposed.spare_s,
            in_time=proposed.in_time,
            throughput=throughput[competitor.job.key],
        )
        for competitor, proposed in zip(competition.competitors, proposals, strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationProblem:
    """A competition in the core's words; ``on`` are, by job and pool, the node groups that it stands on."""

    capacity: PoolCapacity
    demands: tuple[JobDemand, ...]
    on: Mapping[JobKey, Mapping[str, Sequence[NodeGroup]]]


def problem_of(
    competition: Competition, throughput: Mapping[JobKey, ThroughputModel], *, now_s: float
) -> AllocationProblem:
    """Return what to ask the core, the demands in the order of the competitors; ``now_s`` in seconds since the epoch."""
    on = {
        competitor.job.key: {
            pool.name: [group for group in competition.node_groups if competitor.pool_key(pool) in group.sizes]
            for pool in competitor.spec.worker_pools
        }
        for competitor in competition.competitors
    }
    return AllocationProblem(
        capacity=PoolCapacity(_pool(group, competition.competitors, on) for group in competition.node_groups),
        demands=tuple(
            demand_of(competitor, on[competitor.job.key], throughput[competitor.job.key], now_s=now_s)
            for competitor in competition.competitors
        ),
        on=on,
    )


def _with_exhausted_pools(competitor: Competitor, *, making_room: bool, now_s: float) -> Competitor:
    """Return the competitor with its short and exhausted pools as they are now."""
    short_since_s, exhausted, tries = {}, {}, dict(competitor.before.tries)
    for pool in competitor.spec.worker_pools:
        name = pool.name
        placed = sum(worker.placed and worker.pod.pool == name for worker in competitor.workers)
        limit = (competitor.before.limits or {}).get(name, 0)
        if (known := competitor.before.exhausted.get(name)) is not None:
            rest_s = RETRY_S * 2.0 ** min(tries.get(name, 1) - 1, MOST_DOUBLINGS)
            if placed <= known.placed and now_s - known.since_s < rest_s:
                exhausted[name] = Exhausted(known.since_s, placed)
        elif placed < limit:
            short_since_s[name] = now_s if making_room else competitor.before.short_since_s.get(name, now_s)
            if now_s - short_since_s[name] >= EXHAUSTED_AFTER_S:
                exhausted[name], tries[name] = Exhausted(now_s, placed), tries.get(name, 0) + 1
                del short_since_s[name]
        elif limit:
            tries.pop(name, None)
    return replace(
        competitor, before=replace(competitor.before, short_since_s=short_since_s, exhausted=exhausted, tries=tries)
    )


def _all_fit(competition: Competition, problem: AllocationProblem) -> bool:
    """Tell whether every job may have as many workers as its pools could hold: then nobody is in anybody's way.

    Workers stay on the node groups where they are. May say no where a cleverer packing exists; never yes where there is none.
    """
    occupancy, on = Occupancy(problem.capacity), problem.on
    pool_keys = [(competitor, pool) for competitor in competition.competitors for pool in competitor.spec.worker_pools]
    missing: list[tuple[dict[str, Size], int]] = []
    for competitor, pool in pool_keys:
        groups = on[competitor.job.key][pool.name]
        sizes: dict[str, Size] = {group.name: group.sizes[competitor.pool_key(pool)] for group in groups}
        placed = {group.name: len(competitor.placed_on(pool, group)) for group in groups}
        for name, count in placed.items():
            occupancy.add({(name, sizes[name]): count})
        most = min(competitor.most(pool), sum(problem.capacity.slots(name, size) for name, size in sizes.items()))
        missing.append((sizes, most - sum(placed.values())))
    for sizes, count_missing in sorted(missing, key=lambda each: len(each[0])):
        left = count_missing
        for name, size in sizes.items():
            count = occupancy.free_slots(name, size, max(0, left))
            occupancy.add({(name, size): count})
            left -= count
        if left > 0:
            return False
    return True


def _pool(
    group: NodeGroup, competitors: Sequence[Competitor], on: Mapping[JobKey, Mapping[str, Sequence[NodeGroup]]]
) -> Pool:
    """Return a node group as the core sees it, with the losses that its jobs have suffered there."""
    losses = watched_s = 0.0
    spot = False
    for competitor in competitors:
        lost = {pool.name: pool.disruptions for pool in competitor.job.status.pools}
        since_s = seconds(competitor.job.status.training_since)
        for pool in competitor.spec.worker_pools:
            groups = on[competitor.job.key][pool.name]
            if group not in groups:
                continue
            spot = spot or pool.capacity_type is CapacityType.SPOT
            here = len(competitor.placed_on(pool, group))
            # A pool on several node groups remembers its losses as a whole: each node group gets its part by nodes.
            losses += lost.get(pool.name, 0) * len(group.nodes) / sum(len(each.nodes) for each in groups)
            if since_s:
                watched_s += max(0.0, competitor.telemetry.newest_sample_s - since_s) * max(1, here)
    return Pool(name=group.name, nodes=tuple(group.nodes.values()), spot=spot, losses=losses, watched_s=watched_s)
