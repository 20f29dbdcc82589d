"""Who gets which nodes: over all jobs, from what each is worth there to the workers that each shall have.

Elastic jobs take what fits; that is right as long as nobody else wants the same nodes. Where jobs compete, the core's
allocation decides, and what it says becomes limits for each job's own pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from heterotrain_core.allocate.capacity import Room
from heterotrain_core.allocate.problem import JobDemand, Objective, Pool, Size
from heterotrain_core.allocate.propose import KnownRates, propose
from heterotrain_core.allocate.value import timed

from heterotrain_operator.api.pools import CapacityType
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.allocation.competition import Contest
from heterotrain_operator.decide.allocation.demand import Bidder, demand_of, learn
from heterotrain_operator.decide.allocation.node_group import Ground
from heterotrain_operator.decide.allocation.placement import Settlement
from heterotrain_operator.decide.grants.grant import Dry, JobGrant, Learned
from heterotrain_operator.decide.workers.state import WorkerState

DRY_S = 60.0
"""A worker that was granted and has found no node for so long shows that the pool is out of stock, whatever we count."""
RETRY_S = 600.0
"""After this long a pool that was out of stock is tried again, even if no worker that waits there has found a node; twice as
long each time that it gives nothing again."""
MOST_DOUBLINGS = 6


def decide_contest(contest: Contest, *, now_s: float, known: KnownRates | None = None) -> dict[JobKey, JobGrant]:
    """Return what each job of a contest may have; ``known`` are rates of former decisions.

    Deciding again after everybody has what he was given changes nothing. What a worker waits for in vain (``DRY_S``) is
    taken as out of stock until it, or another one, finds a node there.
    """
    making_room = any(worker.state is WorkerState.LEAVING for bidder in contest.bidders for worker in bidder.workers)
    watched = tuple(_watched(bidder, making_room=making_room, now_s=now_s) for bidder in contest.bidders)
    contest = replace(contest, bidders=watched)
    learned = {b.job.key: learn(b.before.learned, b.plan, b.telemetry) for b in contest.bidders}
    question = question_of(contest, learned, now_s=now_s)
    frugal = any(demand.objective is Objective.COST or timed(demand) for demand in question.demands)
    if not frugal and (len(contest.bidders) == 1 or _all_fit(contest, question)):
        return {
            b.job.key: JobGrant(dry=b.before.dry, tries=b.before.tries, learned=learned[b.job.key])
            for b in contest.bidders
        }
    proposals = propose(question.pools, question.demands, known=known).grants
    settlement = Settlement(contest.bidders, question.on, Room(question.pools), proposals)
    return {
        bidder.job.key: replace(
            settlement.grant(bidder, proposed),
            spare_s=proposed.spare_s,
            in_time=proposed.in_time,
            learned=learned[bidder.job.key],
        )
        for bidder, proposed in zip(contest.bidders, proposals, strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A contest in the core's words; ``on`` are, by job and pool, the grounds that it stands on."""

    pools: tuple[Pool, ...]
    demands: tuple[JobDemand, ...]
    on: Mapping[JobKey, Mapping[str, Sequence[Ground]]]


def question_of(contest: Contest, learned: Mapping[JobKey, Learned], *, now_s: float) -> Question:
    """Return what to ask the core, the demands in the order of the bidders; ``now_s`` in seconds since the epoch."""
    on = {
        bidder.job.key: {
            pool.name: [ground for ground in contest.grounds if bidder.claim(pool) in ground.sizes]
            for pool in bidder.spec.worker_pools
        }
        for bidder in contest.bidders
    }
    return Question(
        pools=tuple(_pool(ground, contest.bidders, on) for ground in contest.grounds),
        demands=tuple(
            demand_of(bidder, on[bidder.job.key], learned[bidder.job.key], now_s=now_s) for bidder in contest.bidders
        ),
        on=on,
    )


def _watched(bidder: Bidder, *, making_room: bool, now_s: float) -> Bidder:
    """Return the bidder with its short and dry pools as they are now."""
    short, dry, tries = {}, {}, dict(bidder.before.tries)
    for pool in bidder.spec.worker_pools:
        name = pool.name
        placed = sum(worker.placed and worker.pod.pool == name for worker in bidder.workers)
        limit = (bidder.before.limits or {}).get(name, 0)
        if (known := bidder.before.dry.get(name)) is not None:
            rest_s = RETRY_S * 2.0 ** min(tries.get(name, 1) - 1, MOST_DOUBLINGS)
            if placed <= known.placed and now_s - known.since_s < rest_s:
                dry[name] = Dry(known.since_s, placed)
        elif placed < limit:
            short[name] = now_s if making_room else bidder.before.short.get(name, now_s)
            if now_s - short[name] >= DRY_S:
                dry[name], tries[name] = Dry(now_s, placed), tries.get(name, 0) + 1
                del short[name]
        elif limit:
            tries.pop(name, None)
    return replace(bidder, before=replace(bidder.before, short=short, dry=dry, tries=tries))


def _all_fit(contest: Contest, question: Question) -> bool:
    """Tell whether every job may have as many workers as its pools could hold: then nobody is in anybody's way.

    Workers stay on the grounds where they are. May say no where a cleverer packing exists; never yes where there is none.
    """
    room, on = Room(question.pools), question.on
    claims = [(bidder, pool) for bidder in contest.bidders for pool in bidder.spec.worker_pools]
    missing: list[tuple[dict[str, Size], int]] = []
    for bidder, pool in claims:
        stands = on[bidder.job.key][pool.name]
        sizes: dict[str, Size] = {ground.name: ground.sizes[bidder.claim(pool)] for ground in stands}
        placed = {ground.name: len(bidder.placed_on(pool, ground)) for ground in stands}
        for name, count in placed.items():
            room.hold({(name, sizes[name]): count})
        most = min(bidder.most(pool), sum(room.places(name, size) for name, size in sizes.items()))
        missing.append((sizes, most - sum(placed.values())))
    for sizes, count_missing in sorted(missing, key=lambda each: len(each[0])):
        left = count_missing
        for name, size in sizes.items():
            count = room.more(name, size, max(0, left))
            room.hold({(name, size): count})
            left -= count
        if left > 0:
            return False
    return True


def _pool(ground: Ground, bidders: Sequence[Bidder], on: Mapping[JobKey, Mapping[str, Sequence[Ground]]]) -> Pool:
    """Return a ground as the core sees it, with the losses that its jobs have suffered there."""
    losses = watched_s = 0.0
    spot = False
    for bidder in bidders:
        lost = {pool.name: pool.disruptions for pool in bidder.job.status.pools}
        since_s = seconds(bidder.job.status.training_since)
        for pool in bidder.spec.worker_pools:
            stands = on[bidder.job.key][pool.name]
            if ground not in stands:
                continue
            spot = spot or pool.capacity_type is CapacityType.SPOT
            here = len(bidder.placed_on(pool, ground))
            # A pool on several grounds remembers its losses as a whole: each ground gets its part by nodes.
            losses += lost.get(pool.name, 0) * len(ground.nodes) / sum(len(each.nodes) for each in stands)
            if since_s:
                watched_s += max(0.0, bidder.telemetry.newest_sample_s - since_s) * max(1, here)
    return Pool(name=ground.name, nodes=tuple(ground.nodes.values()), spot=spot, losses=losses, watched_s=watched_s)
