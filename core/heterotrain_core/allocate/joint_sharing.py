"""Two or three jobs at once: what they hold, and what is free beside it, is shared anew in the best way of all.

It finds what no change of one job does, and no single worker that changes hands: a job that gives all but its minimum
because every change costs it one pause, two that change pools, one that makes room only for several workers together.

Legend: ``O`` a job's options.

Prices say where to look. With ``slack`` what an option is worth less than the job's best at the prices, and ``free``
the price of the room that nobody uses, new options instead of old ones gain at most ``Σ slack(old) - Σ slack(new) +
free``: nothing where the jobs are content, and nothing by an option that has more slack than that. (Exact where a
pool's workers have one size; where sizes mix, the parts of a pool are approximate, and so is what is left out.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice

import numpy as np

from heterotrain_core.allocate.candidate import NOTHING, Candidate
from heterotrain_core.allocate.capacity import Room
from heterotrain_core.allocate.prices import Prices
from heterotrain_core.allocate.value import Floats, Option

_PARTNERS = 32
"""Other jobs that a job is looked at with."""
_MOST_PAIRS = 600
_THREES_OF = 8
"""Jobs of which every three are looked at once no pair finds anything: the least content."""
_MOST_EACH = 3000
"""Options that are tried for one group."""
_MOST_TRIALS = 20_000
"""The same over all pairs, and over all threes: some tens of milliseconds."""


def share_anew(candidates: Sequence[Candidate], room: Room, chosen: list[Option | None], prices: Prices) -> None:
    """Let small groups of jobs have the best of their options that fit together beside the other jobs.

    Args:
        candidates: the jobs.
        room: holds what is chosen.
        chosen: their options; changed in place where that is better, never to less. A job without one stays without.
        prices: of the pools; jobs that are furthest from what they would choose at these come first.
    """
    groups = _Groups(candidates, room, chosen, prices)
    before = tuple(chosen)
    groups.look_at(islice(groups.pairs(), _MOST_PAIRS))
    if tuple(chosen) == before:
        groups.look_at(combinations(groups.least_content[:_THREES_OF], 3))


class _Groups:
    """Jobs that run, with what each option is worth less than the job's best at the prices."""

    def __init__(
        self, candidates: Sequence[Candidate], room: Room, chosen: list[Option | None], prices: Prices
    ) -> None:
        self._candidates, self._room, self._chosen, self._prices = candidates, room, chosen, prices
        self._slack_O: dict[int, Floats] = {}
        for i, candidate in enumerate(candidates):
            if chosen[i] is not None:
                net_O = prices.net_of(candidate)
                self._slack_O[i] = net_O.max() - net_O
        self._pools = {i: frozenset({offer.pool for offer in candidates[i].job.offers}) for i in self._slack_O}
        self._slack: dict[int, float] = {}
        self._unused: dict[str, float] = {}
        self._reckon(self._slack_O)
        self.least_content = sorted(self._slack, key=lambda i: (-self._slack[i], i))

    def _reckon(self, changed: Iterable[int]) -> None:
        """Note how content these jobs are with what they have, and the price of what nobody has."""
        for i in changed:
            if (option := self._chosen[i]) is not None:
                self._slack[i] = float(self._slack_O[i][self._candidates[i].place_of(option)])
        self._unused = self._prices.of_unused(self._candidates, self._chosen)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs with a pool in common, those of the least content job first."""
        for place, i in enumerate(self.least_content):
            partners = (j for j in self.least_content[place + 1 :] if not self._pools[i].isdisjoint(self._pools[j]))
            for j in islice(partners, _PARTNERS):
                yield i, j

    def look_at(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Share anew in one group after another, until all were looked at or enough was tried."""
        trials = _MOST_TRIALS
        for group in groups:
            if trials <= 0:
                break
            pools = sorted({pool for i in group for pool in self._pools[i]})
            gain = sum(self._slack[i] for i in group) + sum(self._unused.get(pool, 0.0) for pool in pools)
            if gain > NOTHING:
                before = [self._chosen[i] for i in group]
                trials -= self._share(group, gain, min(trials, _MOST_EACH))
                if any(self._chosen[i] is not had for i, had in zip(group, before, strict=True)):
                    self._reckon(group)

    def _share(self, group: Sequence[int], gain: float, most_trials: int) -> int:
        """Give the jobs the best options that fit together, by branch and bound; return how many were tried."""
        chosen, room = self._chosen, self._room
        for i in group:
            room.hold(self._candidates[i].freed(chosen[i]))
        best = sum(option.score for i in group if (option := chosen[i]) is not None)
        possible = [self._possible(i, gain) for i in group]
        best_after = [0.0] * (len(group) + 1)
        for k in range(len(group) - 1, -1, -1):
            best_after[k] = best_after[k + 1] + max((option.score for option in possible[k][:1]), default=0.0)
        trials = 0

        def visit(k: int, score: float, picked: tuple[Option, ...]) -> None:
            nonlocal best, trials
            if k == len(group):
                best = score
                for i, option in zip(group, picked, strict=True):
                    chosen[i] = option
                return
            candidate = self._candidates[group[k]]
            for option in possible[k]:
                if score + option.score + best_after[k + 1] <= best + NOTHING or trials >= most_trials:
                    return
                trials += 1
                need = candidate.need(option)
                if room.fits(need):
                    room.hold(need)
                    visit(k + 1, score + option.score, (*picked, option))
                    room.hold(candidate.freed(option))

        visit(0, 0.0, ())
        for i in group:
            room.hold(self._candidates[i].need(chosen[i]))
        return trials

    def _possible(self, i: int, gain: float) -> list[Option]:
        """Return the job's options that may be part of a gain, of which each offer's workers alone would fit, best first."""
        candidate = self._candidates[i]
        most = [self._room.more(offer.pool, offer.size, offer.max_workers) for offer in candidate.job.offers]
        within_O = (self._slack_O[i] < gain) & (candidate.arrays[0] <= np.array(most)).all(axis=1)
        return [candidate.options[k] for k in np.flatnonzero(within_O).tolist()]
