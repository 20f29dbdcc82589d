"""Who runs at all: jobs are admitted in order, each with the first of its options that fits, smaller ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import le

from heterotrain_core.allocate.candidate import Candidate
from heterotrain_core.allocate.capacity import Room
from heterotrain_core.allocate.problem import Pool
from heterotrain_core.allocate.value import Option

_OTHER_WAYS = 16
"""Other ways of another job that are tried to seat one that finds no room."""
_MOST_MOVES = 1000
"""The same over all jobs."""
_MOST_LOOKS = 20_000
"""Jobs that are looked at for it."""


Seats = Callable[[Candidate], Iterable[Option]]
"""The options of a job in the order in which they are tried."""


def smallest(candidate: Candidate) -> Iterable[Option]:
    """Return the job's options with the fewest workers first."""
    return candidate.smallest


def admitted(
    candidates: Sequence[Candidate], pools: Sequence[Pool], *, keep: bool, seats: Seats = smallest
) -> list[Option | None]:
    """Return everybody's first option that fits, in order of admission.

    Args:
        candidates: the jobs.
        pools: each name once.
        keep: whether running jobs hold what they have before anybody is seated.
        seats: the options of a job in the order in which they are tried.
    """
    room = Room(pools)
    chosen: list[Option | None] = [None] * len(candidates)
    if keep:
        for i, candidate in enumerate(candidates):
            held = tuple(candidate.job.current.get(offer.key, 0) for offer in candidate.job.offers)
            option = candidate.by_counts.get(held)
            if option is not None and room.fits(candidate.need(option)):
                chosen[i] = option
                room.hold(candidate.need(option))
    moves, looks = _MOST_MOVES, _MOST_LOOKS
    for i in range(len(candidates)):
        if chosen[i] is None and not _seated(candidates, room, chosen, i, seats) and looks > 0:
            moves -= _seated_by_moving_one(candidates, room, chosen, i, seats=seats, most_moves=moves)
            looks -= len(candidates)
    return chosen


def _seated(candidates: Sequence[Candidate], room: Room, chosen: list[Option | None], i: int, seats: Seats) -> bool:
    """Give the job its first option that fits; return whether there is one."""
    candidate = candidates[i]
    most = [room.more(offer.pool, offer.size, offer.max_workers) for offer in candidate.job.offers]
    for option in seats(candidate) if any(most) else ():
        if not all(map(le, option.counts, most)):
            continue
        need = candidate.need(option)
        if room.fits(need):
            room.hold(need)
            chosen[i] = option
            return True
    return False


def _seated_by_moving_one(
    candidates: Sequence[Candidate], room: Room, chosen: list[Option | None], i: int, *, seats: Seats, most_moves: int
) -> int:
    """Give the job its first option after some other job took another way to run, the latest first.

    Return how many ways were tried.
    """
    moves = 0
    if not candidates[i].options:
        return moves
    pools = {offer.pool for offer in candidates[i].job.offers}
    for j in range(len(candidates) - 1, -1, -1):
        now = chosen[j]
        if now is None or j == i or pools.isdisjoint(pool for pool, _ in candidates[j].need(now)):
            continue
        room.hold(candidates[j].freed(now))
        for other in islice(seats(candidates[j]), _OTHER_WAYS):
            need = candidates[j].need(other)
            if moves >= most_moves or not room.fits(need):
                continue
            moves += 1
            room.hold(need)
            chosen[j] = other
            if _seated(candidates, room, chosen, i, seats):
                return moves
            room.hold(candidates[j].freed(other))
        chosen[j] = now
        room.hold(candidates[j].need(now))
        if moves >= most_moves:
            break
    return moves
