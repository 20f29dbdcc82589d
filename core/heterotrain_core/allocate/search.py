"""A good joint choice of options where there are too many for branch and bound: by prices, and shared anew in small groups.

Jobs are admitted in order: a job that comes first is never left waiting for one that comes later, and no job is stopped
for a later one, but a running job may shrink to its minimum to let another run. Among equal admissions the sum of
scores counts; scores are logarithms of rates, so the sum is the proportionally fair one (Nash). Everything is
deterministic: the same input gives the same output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from heterotrain_core.allocate.admission import admitted
from heterotrain_core.allocate.candidate import NOTHING, Candidate, Choice, difference
from heterotrain_core.allocate.capacity import Room
from heterotrain_core.allocate.joint_sharing import share_anew
from heterotrain_core.allocate.prices import Prices, prices
from heterotrain_core.allocate.problem import Pool
from heterotrain_core.allocate.value import Option

_ROUNDS = 4


def searched(candidates: Sequence[Candidate], pools: Sequence[Pool]) -> Choice:
    """Return a good choice: the better of one built on what jobs have and one built by prices, improved in small groups."""
    kept = _improved(candidates, pools, admitted(candidates, pools, keep=True))
    found = prices(candidates, kept, pools)
    bought = admitted(candidates, pools, keep=False, seats=found.seats)
    best = max(kept, _improved(candidates, pools, bought), key=rank)
    return _improved(candidates, pools, best, found)


def rank(choice: Choice) -> tuple[tuple[bool, ...], float]:
    """Return what choices are compared by: who is admitted, in order, then the sum of scores."""
    return tuple(option is not None for option in choice), sum(option.score for option in choice if option is not None)


def _improved(
    candidates: Sequence[Candidate],
    pools: Sequence[Pool],
    start: Sequence[Option | None],
    groups: Prices | None = None,
) -> Choice:
    """Return what a start becomes when workers are given, jobs answer, and groups share anew, until nobody moves.

    Args:
        candidates: the jobs.
        pools: each name once.
        start: their options, which together fit.
        groups: prices that tell which groups of jobs to look at; ``None`` for none.
    """
    chosen = list(start)
    room = Room(pools)
    for candidate, option in zip(candidates, chosen, strict=True):
        room.hold(candidate.need(option))
    tables = [candidate.by_counts for candidate in candidates]
    for _ in range(_ROUNDS):
        before = tuple(chosen)
        if groups is not None:
            share_anew(candidates, room, chosen, groups)
            if tuple(chosen) == before:
                break
        _grow(candidates, tables, room, chosen)
        _answer(candidates, room, chosen)
        if tuple(chosen) == before:
            break
    return tuple(chosen)


def _grow(
    candidates: Sequence[Candidate],
    tables: Sequence[Mapping[tuple[int, ...], Option]],
    room: Room,
    chosen: list[Option | None],
) -> None:
    """Give one worker at a time to the job that gains most by it, per part of a node."""
    gains: list[tuple[float, int, Option]] = []

    def look_at(i: int) -> None:
        best = _best_step(candidates[i], tables[i], room, chosen[i])
        if best is not None:
            heappush(gains, (-best[0], i, best[1]))

    for i in range(len(candidates)):
        look_at(i)
    while gains:
        _, i, option = heappop(gains)
        step = difference(candidates[i], chosen[i], option)
        if room.fits(step):
            room.hold(step)
            chosen[i] = option
        look_at(i)  # what others took meanwhile may have left no room for what was best


def _best_step(
    candidate: Candidate, table: Mapping[tuple[int, ...], Option], room: Room, now: Option | None
) -> tuple[float, Option] | None:
    """Return the best single worker more that fits, as (gain of each per part of a node, option)."""
    if now is None:
        return None
    best: tuple[float, Option] | None = None
    for place, offer in enumerate(candidate.job.offers):
        counts = (*now.counts[:place], now.counts[place] + 1, *now.counts[place + 1 :])
        option = table.get(counts)
        if option is None or option.score <= now.score + NOTHING:
            continue
        gain = (option.score - now.score) * room.per_node(offer.pool, offer.size)
        if (best is None or gain > best[0] + NOTHING) and room.fits(difference(candidate, now, option)):
            best = (gain, option)
    return best


def _answer(candidates: Sequence[Candidate], room: Room, chosen: list[Option | None]) -> None:
    """Let each job in order take the best of its options that fits beside what the others hold."""
    for i, candidate in enumerate(candidates):
        now = chosen[i]
        room.hold(candidate.freed(now))
        most = [room.more(offer.pool, offer.size, offer.max_workers) for offer in candidate.job.offers]
        if candidate.options and any(most):
            counts_OP, score_O = candidate.arrays
            least = -np.inf if now is None else now.score + NOTHING
            better = np.flatnonzero((score_O > least) & (counts_OP <= np.array(most)).all(axis=1))
            for k in better.tolist():  # options come best first
                option = candidate.options[k]
                if room.fits(candidate.need(option)):
                    chosen[i] = option
                    break
        room.hold(candidate.need(chosen[i]))
