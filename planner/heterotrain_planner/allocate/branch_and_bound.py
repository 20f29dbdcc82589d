"""The best choice of all, by branch and bound; affordable for a few jobs only."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_planner.allocate.candidate import EPSILON, Candidate, Choice
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.value import Option

MOST_TRIALS = 20_000
"""Options that are tried before the search takes over: about a fifth of a second."""


def best_choice(
    candidates: Sequence[Candidate], capacity: PoolCapacity, *, occupancy: Occupancy | None = None
) -> Choice | None:
    """Return the best choice of all, ``None`` when ``MOST_TRIALS`` did not suffice to prove it.

    Args:
        candidates: the jobs, in the order of admission.
        capacity: of the pools.
        occupancy: an empty one, used for all trials. If it is uncertain afterwards, there may be a better choice, by a
            packing that was not found.
    """
    occupancy = Occupancy(capacity) if occupancy is None else occupancy
    size = len(candidates)
    best_after = [0.0] * (size + 1)
    for i in range(size - 1, -1, -1):
        options = candidates[i].options
        best_after[i] = best_after[i + 1] + max(0.0, options[0].score if options else 0.0)
    search = _Search(candidates, occupancy, best_after)
    return search.best[2] if search.visit(0, 0, 0.0, []) else None


class _Search:
    """One search over all choices.

    A function that calls itself by its own name would be part of a cycle, and keep candidates until garbage is
    collected.
    """

    def __init__(self, candidates: Sequence[Candidate], occupancy: Occupancy, best_after: Sequence[float]) -> None:
        self._candidates = candidates
        self._occupancy = occupancy
        self._best_after = best_after
        self._trials = 0
        self.best: tuple[int, float, Choice] = (-1, 0.0, ())

    def visit(self, i: int, admitted: int, score: float, chosen: list[Option | None]) -> bool:
        """Try all options of the candidates from ``i`` on; return whether the trials sufficed."""
        left = len(self._candidates) - i
        if not left:
            if (admitted, score) > (self.best[0], self.best[1] + EPSILON):
                self.best = (admitted, score, tuple(chosen))
            return True
        rest = (1 << left) - 1
        if (admitted << left | rest, score + self._best_after[i]) <= (self.best[0], self.best[1] + EPSILON):
            return True
        candidate = self._candidates[i]
        for option in candidate.options:
            self._trials += 1
            if self._trials > MOST_TRIALS:
                return False
            need = candidate.need(option)
            if self._occupancy.fits(need):
                self._occupancy.add(need)
                finished = self.visit(i + 1, admitted << 1 | 1, score + option.score, [*chosen, option])
                self._occupancy.add(candidate.freed(option))
                if not finished:
                    return False
        return self.visit(i + 1, admitted << 1, score, [*chosen, None])
