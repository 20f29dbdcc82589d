"""Gains that only several workers together bring: a single one does not pay for the pause and the margin of a change, six do.

Workers are free, or are given by other jobs, one after another by whoever misses the next one least.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from heterotrain_core.allocate.candidate import NOTHING, Candidate, difference
from heterotrain_core.allocate.room import Room
from heterotrain_core.allocate.value import Option

_MOST_LOOKS = 20_000
"""Jobs that are asked what they would give, over all that would take several: some tens of milliseconds."""
_SIZES = 4
"""Numbers of workers that are tried for one job in one pool, those of most gain a worker first."""

Table = Mapping[tuple[int, ...], Option]


def several(now: Option, place: int, table: Table, most: int) -> Iterator[tuple[float, Option]]:
    """Yield (gain of score a worker, option) for two and more workers beyond ``now`` at one offer, up to ``most`` there.

    Nothing where a single one pays already: those are given singly.
    """
    have = now.counts[place]
    for count in range(have + 1, most + 1):
        option = table.get((*now.counts[:place], count, *now.counts[place + 1 :]))
        if option is None or option.score <= now.score + NOTHING:
            continue
        if count == have + 1:
            return
        yield (option.score - now.score) / (count - have), option


def give_several(
    candidates: Sequence[Candidate], tables: Sequence[Table], room: Room, chosen: list[Option | None]
) -> None:
    """Let jobs that gain by several workers at once have them from the others, as long as the sum of scores grows by it."""
    wanted: list[tuple[float, int, Option]] = []
    for i, candidate in enumerate(candidates):
        now = chosen[i]
        if now is None:
            continue
        for place, offer in enumerate(candidate.job.offers):
            sizes = sorted(several(now, place, tables[i], offer.max_workers), key=lambda size: -size[0])
            wanted += [(-gain, i, option) for gain, option in sizes[:_SIZES]]
    looks = _MOST_LOOKS
    for _, i, larger in sorted(wanted, key=lambda want: want[:2]):
        now = chosen[i]
        if looks <= 0:
            break
        # What was given since may have changed the job: then it is asked again in the next round.
        if now is not None and larger.score > now.score + NOTHING and _differ_at(now, larger) == 1:
            looks -= len(candidates)
            _collect(candidates, tables, room, chosen, (i, larger))


def _differ_at(one: Option, other: Option) -> int:
    return sum(a != b for a, b in zip(one.counts, other.counts, strict=True))


def _collect(
    candidates: Sequence[Candidate],
    tables: Sequence[Table],
    room: Room,
    chosen: list[Option | None],
    wanted: tuple[int, Option],
) -> None:
    """Give a job the option that it wants if the others can make room for it at a smaller loss than its gain."""
    taker, larger = wanted
    now = chosen[taker]
    if now is None:
        return
    left = larger.score - now.score
    step = difference(candidates[taker], now, larger)
    pools = {pool for pool, _ in step}
    after = dict(enumerate(chosen))
    after[taker] = larger
    losses = [
        given for j in range(len(candidates)) if j != taker for given in _givings(candidates, tables, after, j, pools)
    ]
    heapify(losses)
    while not room.fits(step):
        if not losses:
            return
        loss, j, counts, smaller = heappop(losses)
        before = after[j]
        if before is None or before.counts != counts:
            continue  # it has given something else meanwhile
        left -= loss
        if left <= NOTHING:
            return
        for key, count in difference(candidates[j], before, smaller).items():
            step[key] = step.get(key, 0) + count
        after[j] = smaller
        for given in _givings(candidates, tables, after, j, pools):
            heappush(losses, given)
    room.hold(step)
    for j, option in after.items():
        chosen[j] = option


def _givings(
    candidates: Sequence[Candidate],
    tables: Sequence[Table],
    after: Mapping[int, Option | None],
    j: int,
    pools: set[str],
) -> Iterator[tuple[float, int, tuple[int, ...], Option]]:
    """Yield (loss of score, job, its workers before, option) for a worker less of a job in each of these pools."""
    now = after[j]
    if now is None:
        return
    for place, offer in enumerate(candidates[j].job.offers):
        if offer.pool in pools and now.counts[place]:
            smaller = tables[j].get((*now.counts[:place], now.counts[place] - 1, *now.counts[place + 1 :]))
            if smaller is not None:
                yield now.score - smaller.score, j, now.counts, smaller
