"""The best joint choice of options: exact by branch and bound for few jobs, otherwise grown, answered and traded.

Jobs are admitted in order: a job that comes first is never left waiting for one that comes later, and no job is stopped
for a later one, but a running job may shrink to its minimum to let another run. Among equal admissions the sum of
scores counts; scores are logarithms of rates, so the sum is the proportionally fair one (Nash). Everything is
deterministic: the same input gives the same output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from operator import le

from heterotrain_core.allocate.admission import admitted
from heterotrain_core.allocate.candidate import NOTHING, Candidate, Choice, difference
from heterotrain_core.allocate.room import Room
from heterotrain_core.allocate.several import give_several, several
from heterotrain_core.allocate.trade import trade
from heterotrain_core.allocate.value import Option
from heterotrain_core.allocate.views import Pool

_ROUNDS = 4


def searched(candidates: Sequence[Candidate], pools: Sequence[Pool]) -> Choice:
    """Return a good choice: the better of one built from nothing and one built on what the jobs have."""
    starts = [admitted(candidates, pools, keep=keep) for keep in (True, False)]
    return max((_improved(candidates, pools, start) for start in starts), key=rank)


def rank(choice: Choice) -> tuple[tuple[bool, ...], float]:
    """Return what choices are compared by: who is admitted, in order, then the sum of scores."""
    return tuple(option is not None for option in choice), sum(option.score for option in choice if option is not None)


def _improved(candidates: Sequence[Candidate], pools: Sequence[Pool], start: Sequence[Option | None]) -> Choice:
    chosen = list(start)
    room = Room(pools)
    for candidate, option in zip(candidates, chosen, strict=True):
        room.hold(candidate.need(option))
    tables = [candidate.by_counts for candidate in candidates]
    for _ in range(_ROUNDS):
        before = tuple(chosen)
        _grow(candidates, tables, room, chosen)
        _answer(candidates, room, chosen)
        trade(candidates, tables, room, chosen)
        give_several(candidates, tables, room, chosen)
        if tuple(chosen) == before:
            break
    return tuple(chosen)


def _grow(
    candidates: Sequence[Candidate],
    tables: Sequence[Mapping[tuple[int, ...], Option]],
    room: Room,
    chosen: list[Option | None],
) -> None:
    """Give one worker at a time (several where only these gain) to the job that gains most by it, per part of a node."""
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
    """Return the best single worker more that fits, else several of one pool, as (gain of each per part of a node, option)."""
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
    if best is not None:
        return best
    for place, offer in enumerate(candidate.job.offers):
        for each, option in several(now, place, table, offer.max_workers):
            gain = each * room.per_node(offer.pool, offer.size)
            if (best is None or gain > best[0] + NOTHING) and room.fits(difference(candidate, now, option)):
                best = (gain, option)
    return best


def _answer(candidates: Sequence[Candidate], room: Room, chosen: list[Option | None]) -> None:
    """Let each job in order take the best of its options that fits beside what the others hold."""
    for i, candidate in enumerate(candidates):
        now = chosen[i]
        room.hold(candidate.freed(now))
        most = [room.more(offer.pool, offer.size, offer.max_workers) for offer in candidate.job.offers]
        for option in candidate.options if any(most) else ():
            if now is not None and option.score <= now.score + NOTHING:
                break
            if all(map(le, option.counts, most)) and room.fits(candidate.need(option)):
                chosen[i] = option
                break
        room.hold(candidate.need(chosen[i]))
