"""The best choice of all, by branch and bound; affordable for a few jobs only."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.allocate.candidate import EPSILON, Candidate, Choice
from heterotrain_core.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_core.allocate.value import Option

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
    best: tuple[int, float, Choice] = (-1, 0.0, ())
    trials = 0

    def visit(i: int, admitted: int, score: float, chosen: list[Option | None]) -> bool:
        nonlocal best, trials
        if i == size:
            if (admitted, score) > (best[0], best[1] + EPSILON):
                best = (admitted, score, tuple(chosen))
            return True
        rest = (1 << (size - i)) - 1
        if (admitted << (size - i) | rest, score + best_after[i]) <= (best[0], best[1] + EPSILON):
            return True
        candidate = candidates[i]
        for option in candidate.options:
            trials += 1
            if trials > MOST_TRIALS:
                return False
            need = candidate.need(option)
            if occupancy.fits(need):
                occupancy.add(need)
                finished = visit(i + 1, admitted << 1 | 1, score + option.score, [*chosen, option])
                occupancy.add(candidate.freed(option))
                if not finished:
                    return False
        return visit(i + 1, admitted << 1, score, [*chosen, None])

    return best[2] if visit(0, 0, 0.0, []) else None
