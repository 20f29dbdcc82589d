"""The least level at which the members together take a whole batch: exact over the finite set of possible step times.

No ``t_i`` falls with the share, so the samples that all members finish within a level do not fall with the level. The
least sufficient level is one of the values ``t_i(n)``, and any integer division within it is optimal.

Legend: ``W`` members, ``C`` candidate batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterotrain_core.split.proportion import in_proportion
from heterotrain_core.split.step_time import Floats, Ints, Timing

_NEWTON_STEPS = 24
"""Most Newton steps for the real-valued level; the exact step corrects the rest."""
_SHARED_START = 4
"""Totals from which on all levels are sought from that of the middle one."""
_SMALL_SPREAD = 64
"""Granules between two levels, besides four for each member, that are listed one by one instead of halving further."""


def least_shares(timing: Timing, totals: Sequence[int]) -> Ints:
    """Return for each total the shares ``_CW`` with the least greatest step time.

    Members whose floor alone takes longer than the level keep their floor, and the others are levelled among
    themselves. Surplus samples are removed evenly from the members that reach the level exactly, highest rank first.

    All members have one granularity, of which each total is a multiple between the sums of floors and caps.
    """
    # A quarter of a granule per member is close enough: the exact step corrects it, and micro-batches jump by more.
    near = 0.25 * float(timing.granularity_W.sum())
    starts = real_levels(timing, np.array(totals, dtype=float), near_samples=near)
    firsts = timing.most(starts[:, None])
    return np.stack([_exact(timing, t, float(s), f) for t, s, f in zip(totals, starts, firsts, strict=True)])


def real_levels(
    timing: Timing, totals_C: Floats, *, counts_CW: Floats | None = None, near_samples: float = 0.0
) -> Floats:
    """Return for each total the level of the real-valued relaxation, by Newton steps kept inside a shrinking bracket.

    Args:
        timing: the members.
        totals_C: samples; between the sums of floors and caps.
        counts_CW: how many members of each kind there are; ``None`` for one of each.
        near_samples: tolerated difference between the samples at the level and the total, besides rounding.
    """
    shape = (len(totals_C), len(timing.lo_W))
    present_CW = np.ones(shape, dtype=bool) if counts_CW is None else counts_CW > 0
    one_cluster = isinstance(timing.overlapped_s, float)
    rows = (1, shape[1]) if one_cluster else shape
    at_hi_CW = timing.step_s(np.broadcast_to(timing.hi_W, rows))
    low: Floats = np.broadcast_to(timing.step_s(np.broadcast_to(timing.lo_W, rows)).min(axis=1), shape[:1])
    high: Floats = np.where(present_CW, at_hi_CW, 0.0).max(axis=1)
    # Where the total takes every member's cap, shares end to grow at the level: any higher one would seem right, too.
    most_C = (present_CW if counts_CW is None else counts_CW) @ timing.hi_W
    level = np.where(totals_C >= most_C, high, (low + high) / 2)
    if counts_CW is None and len(totals_C) >= _SHARED_START and one_cluster:
        along = _along_tangent(timing, totals_C, near_samples)
        level = np.where((along > low) & (along < high) & (totals_C < most_C), along, level)
    low, high = low.copy(), high.copy()
    rows_C = np.arange(len(totals_C))
    for _ in range(_NEWTON_STEPS):
        at = level[rows_C]
        shares, slopes = timing.real_most(at[:, None])
        if counts_CW is not None:
            shares, slopes = shares * counts_CW[rows_C], slopes * counts_CW[rows_C]
        missing = totals_C[rows_C] - shares.sum(axis=1)
        slope = slopes.sum(axis=1)
        found = np.abs(missing) < near_samples + 1e-6 * np.maximum(totals_C[rows_C], 1.0)
        if found.all():
            break
        low[rows_C] = np.where(missing > 0, at, low[rows_C])
        high[rows_C] = np.where(missing > 0, high[rows_C], at)
        with np.errstate(divide="ignore", invalid="ignore"):
            newton = at + missing / slope
        inside = (newton > low[rows_C]) & (newton < high[rows_C])
        # A level that is found stays: the next step could leave it for the middle of a wide bracket.
        level[rows_C] = np.where(found, at, np.where(inside, newton, (low[rows_C] + high[rows_C]) / 2))
        if one_cluster:  # else each row belongs to an exchange of its own
            rows_C = rows_C[~found]
    return level


def _along_tangent(timing: Timing, totals_C: Floats, near_samples: float) -> Floats:
    """Return levels along the tangent at that of the middle total; NaN where its shares do not grow with the level.

    Levels of one cluster are nearly a line in the total. So the steps from afar are made for one total alone.
    """
    total = totals_C[len(totals_C) // 2]
    known = real_levels(timing, np.array([total]), near_samples=near_samples)
    slope = float(timing.real_most(known[:, None])[1].sum())
    return known[0] + (totals_C - total) / slope if slope > 0 else np.full(len(totals_C), np.nan)


def _exact(timing: Timing, total: int, start: float, first_W: Ints) -> Ints:
    """Return the optimal integer shares, starting from a level near the optimum and what members take within it."""
    granularity = int(timing.granularity_W[0])
    if total <= int(timing.lo_W.sum()):
        return timing.lo_W.copy()
    if total >= int(timing.hi_W.sum()):
        return timing.hi_W.copy()
    low, few_W, high, many_W = _bracket(timing, total, start, first_W)
    low, few_W, high, many_W = _narrow(timing, total, low=low, few_W=few_W, high=high, many_W=many_W)
    more_W = (many_W - few_W) // granularity
    wanted = (total - int(few_W.sum())) // granularity
    if int(more_W.sum()) > _most_listed(len(more_W)):  # no float lies between the two levels: all end at the higher one
        return few_W + np.array(in_proportion(wanted, more_W.tolist()), dtype=np.int64) * granularity
    # Only few granules lie between the two levels: list each of them with its completion time.
    columns = np.repeat(np.arange(len(more_W)), more_W)
    ordinal = np.arange(len(columns)) - np.repeat(np.cumsum(more_W) - more_W, more_W) + 1
    times = timing.step_at(columns, few_W[columns] + ordinal * granularity)
    level = np.partition(times, wanted - 1)[wanted - 1]
    before = np.bincount(columns[times < level], minlength=len(more_W))
    tied = np.bincount(columns[times == level], minlength=len(more_W))
    left = wanted - int(before.sum())
    kept = tied if left == tied.sum() else np.array(in_proportion(left, tied.tolist()), dtype=np.int64)
    return few_W + (before + kept) * granularity


def _bracket(timing: Timing, total: int, start: float, first_W: Ints) -> tuple[float, Ints, float, Ints]:
    """Return a level with too few samples and one with enough, usually close together, and the shares at both."""
    granularity = int(timing.granularity_W[0])
    missing = (total - int(first_W.sum())) // granularity
    # Times that grow by less than a float resolves may fall by its last digit, so no level is asked whether it takes
    # what is known to be done within it.
    if missing > 0:
        # At the time of the missing-th next granule, at least that many more are done.
        next_W = first_W + granularity
        times_W = np.where(next_W <= timing.hi_W, timing.step_s(np.minimum(next_W, timing.hi_W)), np.inf)
        high = float(np.partition(times_W, missing - 1)[missing - 1]) if missing <= len(times_W) else np.inf
        if np.isfinite(high):
            done_W = np.where(times_W <= high, next_W, first_W)
            return start, first_W, high, np.maximum(timing.most(np.array([high])), done_W)
        return start, first_W, float(timing.step_s(timing.hi_W).max()), timing.hi_W.copy()
    # Just below the time of the (surplus + 1)-th latest last granule, at least that many fewer are done.
    surplus = -missing
    times_W = np.where(first_W > timing.lo_W, timing.step_s(first_W), -np.inf)
    if surplus < int((first_W > timing.lo_W).sum()):
        low = float(np.nextafter(np.partition(times_W, -surplus - 1)[-surplus - 1], -np.inf))
        left_W = np.where(times_W > low, first_W - granularity, first_W)
        return low, np.minimum(timing.most(np.array([low])), left_W), start, first_W
    return float(timing.step_s(timing.lo_W).min()) / 2, timing.lo_W, start, first_W


def _most_listed(members: int) -> int:
    return 4 * members + _SMALL_SPREAD


def _narrow(
    timing: Timing, total: int, *, low: float, few_W: Ints, high: float, many_W: Ints
) -> tuple[float, Ints, float, Ints]:
    """Return a bracket with only few granules between its levels, or one that no float divides."""
    granularity = int(timing.granularity_W[0])
    halve = False
    while int((many_W - few_W).sum()) > _most_listed(len(few_W)) * granularity:
        few, many = int(few_W.sum()), int(many_W.sum())
        # Straight-line interpolation, every other time a bisection so that jumps cannot stall it.
        part = 0.5 if halve else (total - few) / (many - few)
        middle = low + (high - low) * min(max(part, 0.02), 0.98)
        halve = not halve
        if not low < middle < high and not low < (middle := (low + high) / 2) < high:
            break
        shares = np.clip(timing.most(np.array([middle])), few_W, many_W)
        if int(shares.sum()) < total:
            low, few_W = middle, shares
        else:
            high, many_W = middle, shares
    return low, few_W, high, many_W
