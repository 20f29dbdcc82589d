"""The best joint choice of options: exact by branch and bound for few jobs, otherwise grown, answered and traded.

Jobs are admitted in order: a job that comes first is never left waiting for one that comes later, and no job is stopped
for a later one, but a running job may shrink to its minimum to let another run. Among equal admissions the sum of
scores counts; scores are logarithms of rates, so the sum is the proportionally fair one (Nash). Everything is
deterministic: the same input gives the same output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from operator import le

from heterotrain_core.allocate.room import Room
from heterotrain_core.allocate.value import Option
from heterotrain_core.allocate.views import JobDemand, Pool, Size

MOST_TRIALS = 20_000
"""Options that branch and bound may try before the heuristic takes over: about a fifth of a second."""
_ROUNDS = 4
_OTHER_WAYS = 16
_MOST_MOVES = 1000
"""Other ways of other jobs that are tried, over all jobs, to seat some that find no room."""
_MOST_LOOKS = 20_000
"""Jobs that are looked at for it."""
_TRADERS = 8
"""In each pool the best of those who would give, and of those who would take, are looked at."""
_NOTHING = 1e-9

Choice = tuple[Option | None, ...]
Need = Mapping[tuple[str, Size], int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job with its options, best first; the sequence of candidates is the order of admission."""

    job: JobDemand
    options: tuple[Option, ...]
    _smallest: list[Option] = field(default_factory=list, compare=False, repr=False)
    _by_counts: dict[tuple[int, ...], Option] = field(default_factory=dict, compare=False, repr=False)
    _needs: dict[tuple[int, ...], dict[tuple[str, Size], int]] = field(default_factory=dict, compare=False, repr=False)

    def need(self, option: Option | None) -> Need:
        """Return the workers of an option by pool and size."""
        if option is None:
            return {}
        found = self._needs.get(option.counts)
        if found is None:
            found = self._needs[option.counts] = {}
            for offer, count in zip(self.job.offers, option.counts, strict=True):
                if count:
                    found[offer.pool, offer.size] = found.get((offer.pool, offer.size), 0) + count
        return found

    @property
    def smallest(self) -> Sequence[Option]:
        """The options with the fewest workers first, the best of as many first."""
        if not self._smallest:
            self._smallest.extend(sorted(self.options, key=lambda option: (sum(option.counts), -option.score)))
        return self._smallest

    @property
    def by_counts(self) -> Mapping[tuple[int, ...], Option]:
        """The options by their workers."""
        if not self._by_counts:
            self._by_counts.update((option.counts, option) for option in self.options)
        return self._by_counts

    def freed(self, option: Option | None) -> dict[tuple[str, Size], int]:
        """Return the same as negative numbers: what becomes free without it."""
        return {key: -count for key, count in self.need(option).items()}


def exact(candidates: Sequence[Candidate], pools: Sequence[Pool]) -> Choice | None:
    """Return the best choice of all, ``None`` when there are too many to be sure."""
    room = Room(pools)
    size = len(candidates)
    best_after = [0.0] * (size + 1)
    for i in range(size - 1, -1, -1):
        options = candidates[i].options
        best_after[i] = best_after[i + 1] + max(0.0, options[0].score if options else 0.0)
    best: tuple[int, float, Choice] = (-1, 0.0, ())
    trials = 0

    def visit(i: int, admitted: int, score: float, chosen: list[Option | None]) -> bool:
        nonlocal best, trials
        if i == size:
            if (admitted, score) > (best[0], best[1] + _NOTHING):
                best = (admitted, score, tuple(chosen))
            return True
        rest = (1 << (size - i)) - 1
        if (admitted << (size - i) | rest, score + best_after[i]) <= (best[0], best[1] + _NOTHING):
            return True
        candidate = candidates[i]
        for option in candidate.options:
            trials += 1
            if trials > MOST_TRIALS:
                return False
            need = candidate.need(option)
            if room.fits(need):
                room.hold(need)
                finished = visit(i + 1, admitted << 1 | 1, score + option.score, [*chosen, option])
                room.hold(candidate.freed(option))
                if not finished:
                    return False
        return visit(i + 1, admitted << 1, score, [*chosen, None])

    return best[2] if visit(0, 0, 0.0, []) else None


def searched(candidates: Sequence[Candidate], pools: Sequence[Pool]) -> Choice:
    """Return a good choice: the better of one built from nothing and one built on what the jobs have."""
    starts = [_admitted(candidates, pools, keep=keep) for keep in (True, False)]
    return max((_improved(candidates, pools, start) for start in starts), key=rank)


def rank(choice: Choice) -> tuple[tuple[bool, ...], float]:
    """Return what choices are compared by: who is admitted, in order, then the sum of scores."""
    return tuple(option is not None for option in choice), sum(option.score for option in choice if option is not None)


def _admitted(candidates: Sequence[Candidate], pools: Sequence[Pool], *, keep: bool) -> list[Option | None]:
    """Return everybody's smallest option that fits, in order; with ``keep`` running jobs hold what they have first."""
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
        if chosen[i] is None and not _seated(candidates, room, chosen, i) and looks > 0:
            moves -= _seated_by_moving_one(candidates, room, chosen, i, moves)
            looks -= len(candidates)
    return chosen


def _seated(candidates: Sequence[Candidate], room: Room, chosen: list[Option | None], i: int) -> bool:
    """Give the job its smallest option that fits; return whether there is one."""
    candidate = candidates[i]
    most = [room.more(offer.pool, offer.size, offer.max_workers) for offer in candidate.job.offers]
    for option in candidate.smallest if any(most) else ():
        if not all(map(le, option.counts, most)):
            continue
        need = candidate.need(option)
        if room.fits(need):
            room.hold(need)
            chosen[i] = option
            return True
    return False


def _seated_by_moving_one(
    candidates: Sequence[Candidate], room: Room, chosen: list[Option | None], i: int, most_moves: int
) -> int:
    """Give the job its smallest option after some other job took another way to run, the latest first.

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
        for other in candidates[j].smallest[:_OTHER_WAYS]:
            need = candidates[j].need(other)
            if moves >= most_moves or not room.fits(need):
                continue
            moves += 1
            room.hold(need)
            chosen[j] = other
            if _seated(candidates, room, chosen, i):
                return moves
            room.hold(candidates[j].freed(other))
        chosen[j] = now
        room.hold(candidates[j].need(now))
        if moves >= most_moves:
            break
    return moves


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
        _trade(candidates, tables, room, chosen)
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
        step = _difference(candidates[i], chosen[i], option)
        if room.fits(step):
            room.hold(step)
            chosen[i] = option
        look_at(i)  # what others took meanwhile may have left no room for what was best


def _best_step(
    candidate: Candidate, table: Mapping[tuple[int, ...], Option], room: Room, now: Option | None
) -> tuple[float, Option] | None:
    """Return the best single worker more that fits, as (gain per part of a node, option)."""
    if now is None:
        return None
    best: tuple[float, Option] | None = None
    for place, offer in enumerate(candidate.job.offers):
        counts = (*now.counts[:place], now.counts[place] + 1, *now.counts[place + 1 :])
        option = table.get(counts)
        if option is None or option.score <= now.score + _NOTHING:
            continue
        gain = (option.score - now.score) * room.per_node(offer.pool, offer.size)
        if (best is None or gain > best[0] + _NOTHING) and room.fits(_difference(candidate, now, option)):
            best = (gain, option)
    return best


def _answer(candidates: Sequence[Candidate], room: Room, chosen: list[Option | None]) -> None:
    """Let each job in order take the best of its options that fits beside what the others hold."""
    for i, candidate in enumerate(candidates):
        now = chosen[i]
        room.hold(candidate.freed(now))
        most = [room.more(offer.pool, offer.size, offer.max_workers) for offer in candidate.job.offers]
        for option in candidate.options if any(most) else ():
            if now is not None and option.score <= now.score + _NOTHING:
                break
            if all(map(le, option.counts, most)) and room.fits(candidate.need(option)):
                chosen[i] = option
                break
        room.hold(candidate.need(chosen[i]))


def _trade(
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


@dataclass(slots=True)
class _Trades:
    """Who could give a worker in one pool, and who could take one: by job and offer, the change of the score."""

    giving: dict[tuple[int, int], tuple[float, int, Option]] = field(default_factory=dict)
    taking: dict[tuple[int, int], tuple[float, int, Option]] = field(default_factory=dict)
    changed: bool = True

    def look_at(self, i: int, place: int, now: Option | None, table: Mapping[tuple[int, ...], Option]) -> None:
        """Note what a job could give or take now with the offer at this place."""
        self.changed = True
        for change, found in ((-1, self.giving), (1, self.taking)):
            option = None
            if now is not None:
                option = table.get((*now.counts[:place], now.counts[place] + change, *now.counts[place + 1 :]))
            if now is None or option is None:
                found.pop((i, place), None)
            else:
                found[i, place] = (option.score - now.score, i, option)

    def best(self) -> tuple[list[tuple[float, int, Option]], list[tuple[float, int, Option]]]:
        """Return the best of those who give and of those who take."""
        best = [nsmallest(_TRADERS, found.values(), key=_by_gain) for found in (self.giving, self.taking)]
        return best[0], best[1]


def _by_gain(trade: tuple[float, int, Option]) -> tuple[float, int]:
    return -trade[0], trade[1]


def _swap(
    candidates: Sequence[Candidate],
    room: Room,
    chosen: list[Option | None],
    giving: Sequence[tuple[float, int, Option]],
    taking: Sequence[tuple[float, int, Option]],
) -> tuple[int, ...]:
    """Carry out the first trade that helps and fits; return whose options it changed, nobody's where there was none."""
    for gain, taker, larger in taking:
        for loss, giver, smaller in giving:
            if giver == taker or gain + loss <= _NOTHING:
                continue
            step = _difference(candidates[giver], chosen[giver], smaller)
            for key, count in _difference(candidates[taker], chosen[taker], larger).items():
                step[key] = step.get(key, 0) + count
            if room.fits(step):
                room.hold(step)
                chosen[giver], chosen[taker] = smaller, larger
                return giver, taker
    return ()


def _difference(candidate: Candidate, before: Option | None, after: Option | None) -> dict[tuple[str, Size], int]:
    step = dict(candidate.need(after))
    for key, count in candidate.need(before).items():
        step[key] = step.get(key, 0) - count
    return {key: count for key, count in step.items() if count}
