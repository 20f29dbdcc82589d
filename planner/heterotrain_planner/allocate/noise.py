"""The efficiency that the noise of steps leaves to so many members, from what was learned with another number of them.

The more members, the later the last of them, and rare long steps make it later much faster than normal noise does. Both
follow from the noise of one member: ``E max`` of so many independent ones. A pause of fixed length counts relative to
the members' own time, which changes with the batch. Legend: ``O`` options.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from numpy.typing import NDArray

from heterotrain_planner.perf.expected_maximum import balanced_ceiling

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_GRID = math.log(2) / 2
"""Logarithmic distance of the pauses for which ceilings are computed; between them, they are interpolated."""
_MOST_PAUSE = 1e3
"""Longest pause relative to the own time; a longer one counts as so long. The shortest one is the inverse."""


def noise_ceilings(
    variation: float, total_O: Ints, hiccups: Hiccups = NO_HICCUPS, own_s_O: Floats | None = None
) -> Floats:
    """Return the best expected efficiency of so many equal members with this noise, ``_O``.

    Args:
        variation: standard deviation of a member's step relative to its mean, without hiccups.
        total_O: members.
        hiccups: of each member.
        own_s_O: mean own seconds of a step; ``None`` leaves pauses out, which gives at least the true efficiency.
    """
    total = total_O.tolist()
    if hiccups.pause_s <= 0 or own_s_O is None:
        if variation <= 0 and hiccups.rate <= 0:
            return np.ones(len(total))
        known = {n: _ceiling(n, variation, hiccups.rate, hiccups.ratio, None) for n in set(total)}
        return np.array([known[n] for n in total])
    pause_O = hiccups.pause_s / np.maximum(own_s_O, hiccups.pause_s / _MOST_PAUSE)
    place_O = np.log(np.maximum(pause_O, 1 / _MOST_PAUSE)) / _GRID
    below_O = np.floor(place_O).astype(np.int64)
    low_O, high_O = np.exp(below_O * _GRID), np.exp((below_O + 1) * _GRID)
    part_O = np.clip((pause_O - low_O) / (high_O - low_O), 0.0, 1.0)
    # The mean of the maximum is nearly a line in the pause, its inverse is not.
    at_low, at_high = (
        np.array(
            [
                1 / _ceiling(n, variation, hiccups.rate, hiccups.ratio, place)
                for n, place in zip(total, (below_O + more).tolist(), strict=True)
            ]
        )
        for more in (0, 1)
    )
    ceiling_O: Floats = 1 / (at_low + part_O * (at_high - at_low))
    return ceiling_O


@lru_cache(maxsize=1 << 14)
def _ceiling(members: int, variation: float, rate: float, ratio: float, pause_place: int | None) -> float:
    pause = 0.0 if pause_place is None else math.exp(pause_place * _GRID)
    hiccups = Hiccups(rate=rate, ratio=ratio, pause_s=pause)
    if members < 2 or (variation <= 0 and hiccups.rate <= 0):  # noqa: PLR2004  # one member waits for no other
        return 1.0
    return balanced_ceiling([variation] * members, hiccups)
