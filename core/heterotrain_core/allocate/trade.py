"""Moving single workers between jobs, as long as the sum of scores grows by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from heterotrain_core.allocate.candidate import NOTHING, Candidate, difference
from heterotrain_core.allocate.room import Room
from heterotrain_core.allocate.value import Option

_TRADERS = 8
"""In each pool the best of those who would give, and of those who would take, are looked at."""

Move = tuple[float, int, Option]
"""The change of a job's score, the job, and the option that it goes to."""


def trade(
    candidates: Sequence[Candidate],
    tables: Sequence[Mapping[tuple[int, ...], Option]],
    room: Room,
    chosen: list[Option | None],
) -> None:
    """Move single workers from the job that misses them least to the one that gains most, pool by pool."""
    names = sorted({offer.pool for candidate in candidates for offer in candidate.job.offers})
    trades = {name: _Trades() for name in names}

    def look_at(i: int) -> None:
        for place, offer in enumerate(candidates[i].job.offers):
            trades[offer.pool].look_at(i, place, chosen[i], tables[i])

    for i in range(len(candidates)):
        look_at(i)
    for _ in range(4 * len(candidates) + 16):
        moved = False
        for name in names:
            # A trade concerns one pool only: where nothing has changed since none was found, there is none now.
            if not trades[name].changed:
                continue
            trades[name].changed = False
            for i in _swap(candidates, room, chosen, *trades[name].best()):
                look_at(i)
                moved = True
        if not moved:
            return


class _Best:
    """Moves by job and offer, of which only the best are asked for: a heap whose outdated entries are dropped on the way."""

    def __init__(self) -> None:
        self._moves: dict[tuple[int, int], Move] = {}
        self._heap: list[tuple[float, int, int]] = []

    def put(self, i: int, place: int, move: Move | None) -> None:
        """Note the move of a job at this offer, ``None`` for none."""
        if move is None:
            self._moves.pop((i, place), None)
        elif self._moves.get((i, place)) != move:
            self._moves[i, place] = move
            heappush(self._heap, (-move[0], i, place))

    def best(self) -> list[Move]:
        """Return the best moves, the best first."""
        found: list[Move] = []
        kept: list[tuple[float, int, int]] = []
        while self._heap and len(found) < _TRADERS:
            entry = heappop(self._heap)
            move = self._moves.get((entry[1], entry[2]))
            if move is not None and -move[0] == entry[0] and (not kept or kept[-1] != entry):
                found.append(move)
                kept.append(entry)
        for entry in kept:
            heappush(self._heap, entry)
        return found


@dataclass(slots=True)
class _Trades:
    """Who could give a worker in one pool, and who could take one."""

    giving: _Best = field(default_factory=_Best)
    taking: _Best = field(default_factory=_Best)
    changed: bool = True

    def look_at(self, i: int, place: int, now: Option | None, table: Mapping[tuple[int, ...], Option]) -> None:
        """Note what a job could give or take now with the offer at this place."""
        self.changed = True
        for change, moves in ((-1, self.giving), (1, self.taking)):
            option = None
            if now is not None:
                option = table.get((*now.counts[:place], now.counts[place] + change, *now.counts[place + 1 :]))
            moves.put(i, place, None if now is None or option is None else (option.score - now.score, i, option))

    def best(self) -> tuple[list[Move], list[Move]]:
        """Return the best of those who give and of those who take."""
        return self.giving.best(), self.taking.best()


def _swap(
    candidates: Sequence[Candidate],
    room: Room,
    chosen: list[Option | None],
    giving: Sequence[Move],
    taking: Sequence[Move],
) -> tuple[int, ...]:
    """Carry out the first trade that helps and fits; return whose options it changed, nobody's where there was none."""
    for gain, taker, larger in taking:
        for loss, giver, smaller in giving:
            if giver == taker or gain + loss <= NOTHING:
                continue
            step = difference(candidates[giver], chosen[giver], smaller)
            for key, count in difference(candidates[taker], chosen[taker], larger).items():
                step[key] = step.get(key, 0) + count
            if room.fits(step):
                room.hold(step)
                chosen[giver], chosen[taker] = smaller, larger
                return giver, taker
    return ()
