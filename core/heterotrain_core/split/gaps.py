"""Divisions where not every number of samples can be reached: falling tables, and mixed granularities.

Within a level, such members take shares from a set with gaps. Then "the members together can take enough" does not
imply that they can take exactly the batch. Sums of such sets are represented as bits of one integer: bit ``b`` means
that ``b`` samples can be reached. Members without gaps count together, by granularity, as one arithmetic progression,
so the work only grows with the number of members with gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShareRun:
    """The shares ``first``, ``first + stride``, …, ``last``."""

    first: int
    last: int
    stride: int


def sums(sets: Sequence[Sequence[ShareRun]], total: int) -> list[int]:
    """Return bit sets of the sums up to ``total`` that the first 0, 1, 2, … sets reach with one share from each."""
    mask = (1 << (total + 1)) - 1
    reached = [1]
    for runs in sets:
        following = 0
        for run in runs:
            following |= _add(reached[-1], run, mask)
        reached.append(following)
    return reached


def pick(sets: Sequence[Sequence[ShareRun]], total: int) -> tuple[int, ...] | None:
    """Return one share from each set so that they sum to ``total``, the largest possible from the last set first."""
    reached = sums(sets, total)
    if not reached[-1] >> total & 1:
        return None
    chosen = []
    left = total
    for runs, before in zip(reversed(sets), reversed(reached[:-1]), strict=True):
        share = max(candidate for run in runs for candidate in _largest_in(run, before, left))
        chosen.append(share)
        left -= share
    return tuple(reversed(chosen))


def _largest_in(run: ShareRun, before: int, left: int) -> list[int]:
    """Return the largest share of the run whose complement is in ``before``, as a list of at most one."""
    share = run.first + (min(run.last, left) - run.first) // run.stride * run.stride
    while share >= run.first:
        if before >> (left - share) & 1:
            return [share]
        share -= run.stride
    return []


def _add(reached: int, run: ShareRun, mask: int) -> int:
    """Return the sums after adding one share of the run; doubling covers the progression in logarithmic steps."""
    last = min(run.last, mask.bit_length() - 1)
    if last < run.first:
        return 0
    steps = (last - run.first) // run.stride
    moved = reached << run.first & mask
    covered = 0
    while covered < steps:
        jump = min(covered + 1, steps - covered)
        moved |= moved << (jump * run.stride) & mask
        covered += jump
    return moved
