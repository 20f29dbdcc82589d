"""The multisets of devices that a search covers: with each one, all of its parts.

Legend: ``U`` multisets, by growing size, ``K`` kinds of devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from heterotrain_planner.layout.costs import Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Multisets:
    """Multisets of devices, the empty one left out.

    Attributes:
        counts_UK: devices of each kind.
        before_UK: index of the multiset with one device of the kind less; −1 where that is empty or impossible.
        starts: index of the first multiset of each size from 1, and at last the number of multisets.
        most_by_kinds: largest size of multisets of 1, 2, … kinds; shorter where some numbers of kinds were left out.
    """

    counts_UK: Ints
    before_UK: Ints
    starts: tuple[int, ...]
    most_by_kinds: tuple[int, ...]


def parts_of(devices: Sequence[int]) -> Multisets:
    """Return all parts of one multiset; it is the last one itself."""
    kinds = sum(1 for count in devices if count)
    return _family(devices, [sum(devices)] * kinds)


def family_of(counts: Sequence[int], *, most_stages: int, most_entries: int) -> Multisets:
    """Return as many multisets as the effort allows, those of few kinds first.

    Each multiset comes with all its parts, because the largest size does not grow with the number of kinds.

    Args:
        counts: devices by kind.
        most_stages: largest multiset.
        most_entries: pairs of a multiset and one of its kinds, at most; at least one for each kind is always taken.
    """
    kinds = [count for count in counts if count]
    limits: list[int] = []
    largest = min(most_stages, sum(kinds))
    left = most_entries
    for different in range(1, len(kinds) + 1):
        if math.comb(len(kinds), different) * different > left:
            break
        # Numbers of kinds that are still to come get an equal part of the effort, except where all have room.
        share = left if different == len(kinds) else max(left // 2, left // (len(kinds) - different + 1))
        sizes = _sizes(kinds, different, largest)
        sums = list(itertools.accumulate(size * different for size in sizes))
        largest = max((size for size, total in enumerate(sums) if total <= share), default=0)
        if largest < different:
            break
        limits.append(largest)
        left -= sums[largest]
    return _family(counts, limits or [1])


def _sizes(counts: Sequence[int], different: int, most: int) -> list[int]:
    """Return how many multisets of exactly so many kinds there are, by size 0 … ``most``."""
    table = [[0] * (most + 1) for _ in range(different + 1)]
    table[0][0] = 1
    for count in counts:
        for chosen in range(different, 0, -1):
            for size in range(most, 0, -1):
                table[chosen][size] += sum(table[chosen - 1][size - taken] for taken in range(1, min(count, size) + 1))
    return table[different]


def _family(counts: Sequence[int], limits: Sequence[int]) -> Multisets:
    present = [index for index, count in enumerate(counts) if count]
    rows: list[tuple[int, ...]] = []
    for different, most in enumerate(limits, start=1):
        for chosen in itertools.combinations(present, different):
            for taken in _bounded([counts[index] for index in chosen], most):
                number = dict(zip(chosen, taken, strict=True))
                rows.append(tuple(number.get(kind, 0) for kind in range(len(counts))))
    rows.sort(key=lambda row: (sum(row), row))
    position = {row: index for index, row in enumerate(rows)}
    counts_UK = np.array(rows, dtype=np.int64).reshape(len(rows), len(counts))
    before_UK = np.full_like(counts_UK, -1)
    for index, row in enumerate(rows):
        for kind in present:
            if row[kind]:
                before_UK[index, kind] = position.get((*row[:kind], row[kind] - 1, *row[kind + 1 :]), -1)
    sizes = counts_UK.sum(axis=1)
    starts = np.searchsorted(sizes, np.arange(1, int(sizes[-1]) + 2)) if rows else np.array([0])
    return Multisets(
        counts_UK=counts_UK, before_UK=before_UK, starts=tuple(starts.tolist()), most_by_kinds=tuple(limits)
    )


def _bounded(counts: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples with 1 … count of each, and a sum of at most ``most``."""
    if len(counts) == 1:
        yield from ((number,) for number in range(1, min(counts[0], most) + 1))
        return
    for number in range(1, min(counts[0], most - len(counts) + 1) + 1):
        for rest in _bounded(counts[1:], most - number):
            yield (number, *rest)
