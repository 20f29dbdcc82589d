"""The allocation: how many workers each job gets on which nodes, from the value that the nodes have for each job.

An elastic job takes what fits. That is correct as long as no other job wants the same nodes. When jobs compete, the
core's allocation decides, and its proposals become limits for each job's own pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.choices import Objective
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, Pool, Size
from heterotrain_planner.allocate.propose import propose
from heterotrain_planner.allocate.rate_cache import RateCache
from heterotrain_planner.allocate.value import timed

from heterotrain_operator.api.pools import CapacityType
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.allocation.competition import Competition
from heterotrain_operator.decide.allocation.demand import Competitor, demand_of
from heterotrain_operator.decide.allocation.layout_values import LayoutValues
from heterotrain_operator.decide.allocation.next_member import next_member_lacks
from heterotrain_operator.decide.allocation.node_group import GroupsByPool, NodeGroup
from heterotrain_operator.decide.allocation.placement import Placement
from heterotrain_operator.decide.grant import Exhausted, JobGrant
from heterotrain_operator.decide.workers.state import WorkerState

EXHAUSTED_AFTER_S = 60.0
"""A pool is exhausted when a granted worker has found no node there for this long, however much room seems free."""
RETRY_S = 600.0
"""An exhausted pool is tried again after this time, even if no worker that waits there has found a node.

The time doubles with every further attempt in which the pool gives no node.
"""
MOST_DOUBLINGS = 6
CANNOT_START_AFTER_S = 30.0
"""A pool is exhausted when a granted worker cannot start on its node for this long: other jobs miss that node."""
CANNOT_START_DOUBLINGS = 2
"""The cause may be outside of the cluster, such as a registry, so that a pool is tried again at least every 40 min."""
PRIORITY_FACTOR = 10.0
"""Beyond minimums, a job counts this many times as much as one of the next lower priority among its competitors."""
MOST_PRIORITIES = 6
"""Priorities that are told apart; lower ones count as equal. It bounds the weights."""


def decide_allocation(
    competition: Competition,
    *,
    now_s: float,
    rate_cache: RateCache | None = None,
    namespace_weights: Mapping[str, float] | None = None,
    layout_values: LayoutValues | None = None,
) -> dict[JobKey, JobGrant]:
    """Return what each job of a competition may have; ``rate_cache`` and ``layout_values`` keep former results.

    Namespaces share the nodes by ``namespace_weights``; those without an entry have weight 1.

    Once every job has its grant, deciding again changes nothing. A pool in which a worker waits longer than
    ``EXHAUSTED_AFTER_S`` counts as exhausted until a worker finds a node there.
    """
    # 1. Note which pools are exhausted, however much room seems free.
    competitors = _with_exhausted_pools(competition.competitors, now_s=now_s)
    competition = replace(competition, competitors=competitors)

    # 2. Put the competition into the core's terms: capacity of the node groups, demands of the jobs.
    values = LayoutValues() if layout_values is None else layout_values
    problem = problem_of(competition, namespace_weights=namespace_weights, now_s=now_s, layout_values=values)

    # 3. Set no limits where no job is in another's way and none wants to save cost.
    frugal = any(demand.objective is Objective.COST or timed(demand) for demand in problem.demands)
    if not frugal and (len(competitors) == 1 or _all_fit(competition, problem)):
        return {c.job.key: JobGrant(exhausted=c.before.exhausted, tries=c.before.tries) for c in competitors}

    # 4. Let the core propose how many workers of each pool each job gets on each node group.
    proposal = propose(problem.capacity, problem.demands, rate_cache=rate_cache)

    # 5. Turn the proposals into grants: limits by pool, workers that leave, pools in which workers may wait.
    placement = Placement(competitors, problem.groups_of, problem.capacity, proposal, now_s=now_s)
    grants = {}
    for competitor, proposed in zip(competitors, proposal.grants, strict=True):
        grant = replace(
            placement.grant(competitor, proposed),
            spare_s=proposed.spare_s,
            in_time=proposed.in_time,
        )
        # 6. A job that other jobs limit gets to know which workers its next member lacks.
        grants[competitor.job.key] = replace(grant, lacks=next_member_lacks(competitor, grant, values))
    return grants


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationProblem:
    """A competition in the core's terms.

    Attributes:
        capacity: capacity of each node group.
        demands: one for each competitor, in the same order.
        groups_of: by job and pool, the node groups that are open to the pool.
    """

    capacity: PoolCapacity
    demands: tuple[JobDemand, ...]
    groups_of: GroupsByPool


def problem_of(
    competition: Competition,
    *,
    now_s: float,
    namespace_weights: Mapping[str, float] | None = None,
    layout_values: LayoutValues | None = None,
) -> AllocationProblem:
    """Return the competition in the core's terms; ``now_s`` in seconds since the epoch."""
    weights, values = namespace_weights or {}, LayoutValues() if layout_values is None else layout_values
    by_priority = priority_weights({competitor.priority for competitor in competition.competitors})
    groups_of = {
        competitor.job.key: {
            pool.name: [group for group in competition.node_groups if competitor.pool_key(pool) in group.sizes]
            for pool in competitor.spec.worker_pools
        }
        for competitor in competition.competitors
    }
    return AllocationProblem(
        capacity=PoolCapacity(_pool(group, competition.competitors, groups_of) for group in competition.node_groups),
        demands=tuple(
            demand_of(
                competitor,
                groups_of[competitor.job.key],
                namespace_weight=weights.get(competitor.job.key.namespace, 1.0),
                now_s=now_s,
                layouts=values.of(competitor),
                weight=by_priority[competitor.priority],
            )
            for competitor in competition.competitors
        ),
        groups_of=groups_of,
    )


def priority_weights(priorities: Collection[int]) -> dict[int, float]:
    """Return the weight of each priority: only their order counts, because values of PriorityClasses have no unit."""
    highest = sorted(priorities, reverse=True)
    least = max(0, min(len(highest), MOST_PRIORITIES) - 1)
    return {priority: PRIORITY_FACTOR ** max(0, least - place) for place, priority in enumerate(highest)}


def _with_exhausted_pools(competitors: Sequence[Competitor], *, now_s: float) -> tuple[Competitor, ...]:
    """Return the competitors with their short and exhausted pools as of now."""
    making_room = any(w.state is WorkerState.LEAVING for competitor in competitors for w in competitor.workers)
    return tuple(_update_exhausted(competitor, making_room=making_room, now_s=now_s) for competitor in competitors)


def _update_exhausted(competitor: Competitor, *, making_room: bool, now_s: float) -> Competitor:
    """Return a competitor with its short and exhausted pools as of now.

    While workers of any job still leave (``making_room``), a missing node does not mean that a pool is exhausted. A
    corrected spec is tried at once.
    """
    short_since_s, exhausted, tries = {}, {}, dict(competitor.before.tries)
    generation = competitor.job.generation
    for pool in competitor.spec.worker_pools:
        name = pool.name
        own = [worker for worker in competitor.workers if worker.pod.pool == name]
        started, ready = sum(w.placed and not w.cannot_start for w in own), any(w.pod.ready for w in own)
        failing = next((worker for worker in own if worker.cannot_start), None)
        limit = (competitor.before.limits or {}).get(name, 0)
        if (known := competitor.before.exhausted.get(name)) is not None:
            doublings = CANNOT_START_DOUBLINGS if known.why else MOST_DOUBLINGS
            rest_s = RETRY_S * 2.0 ** min(tries.get(name, 1) - 1, doublings)
            # A worker that cannot start may look as if it did for a while, so only one that is ready has started.
            better = started > known.placed and (ready or not known.why)
            if not better and known.generation in (0, generation) and now_s - known.since_s < rest_s:
                exhausted[name] = known._replace(placed=started, generation=generation)
        elif started < limit and _is_carried_out(competitor, name):
            before_s = competitor.before.short_since_s.get(name, now_s)
            short_since_s[name] = now_s if making_room and failing is None else before_s
            if now_s - short_since_s[name] >= (EXHAUSTED_AFTER_S if failing is None else CANNOT_START_AFTER_S):
                why = f"{failing.pod.name}: {failing.reason}" if failing is not None else ""
                exhausted[name], tries[name] = Exhausted(now_s, started, generation, why), tries.get(name, 0) + 1
                del short_since_s[name]
        elif started >= limit > 0 and ready:
            tries.pop(name, None)
    return replace(
        competitor, before=replace(competitor.before, short_since_s=short_since_s, exhausted=exhausted, tries=tries)
    )


def _is_carried_out(competitor: Competitor, pool: str) -> bool:
    """Return whether a pass has acted on the grant for a pool: the status then states it.

    Before, missing workers say nothing about nodes: where a thousand jobs begin, passes take minutes.
    """
    limit = (competitor.before.limits or {}).get(pool)
    return any(each.name == pool and each.granted == limit for each in competitor.job.status.pools)


def _all_fit(competition: Competition, problem: AllocationProblem) -> bool:
    """Return whether every job may have as many workers as its pools can hold, so that no job is in another's way.

    Workers stay on their node groups. The answer may be False although a better packing exists, but it is never True
    without one.
    """
    occupancy = Occupancy(problem.capacity)
    pools = [(competitor, pool) for competitor in competition.competitors for pool in competitor.spec.worker_pools]
    missing: list[tuple[dict[str, Size], int]] = []
    for competitor, pool in pools:
        groups = problem.groups_of[competitor.job.key][pool.name]
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


def _pool(group: NodeGroup, competitors: Sequence[Competitor], groups_of: GroupsByPool) -> Pool:
    """Return a node group in the core's terms, with the losses of its jobs there."""
    losses = watched_s = 0.0
    spot = False
    for competitor in competitors:
        lost = {pool.name: pool.disruptions for pool in competitor.job.status.pools}
        since_s = seconds(competitor.job.status.training_since)
        for pool in competitor.spec.worker_pools:
            groups = groups_of[competitor.job.key][pool.name]
            if group not in groups:
                continue
            spot = spot or pool.capacity_type is CapacityType.SPOT
            here = len(competitor.placed_on(pool, group))
            # The status counts a pool's losses over all its node groups: each group gets a part by its number of nodes.
            losses += lost.get(pool.name, 0) * len(group.nodes) / sum(len(each.nodes) for each in groups)
            if since_s:
                watched_s += max(0.0, competitor.telemetry.newest_sample_s - since_s) * max(1, here)
    return Pool(name=group.name, nodes=tuple(group.nodes.values()), spot=spot, losses=losses, watched_s=watched_s)
