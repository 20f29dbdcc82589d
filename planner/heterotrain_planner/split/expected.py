"""Shares under noise: the least expected step in whole samples, and the efficiency that no shares exceed.

Balanced shares end together on average, so a noisy member is often the last. Fewer samples for the noisy members and
more for the quiet ones make the expected step shorter. ``balance`` alone is optimal without noise, and is the start.

Legend: ``W`` members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.balance import Infeasible, Split, balance
from heterotrain_core.split.member import SplitMember
from heterotrain_core.split.result import describe
from heterotrain_core.split.step_time import Ints, Timing

from heterotrain_planner.perf.expected_maximum import Floats, expected_maximum, value_alone
from heterotrain_planner.split.least_expected import Curves, least_expected

LEAST_GAIN_RATIO = 5e-3
"""Least gain over the balanced shares: below it, balanced shares stay, because they are easier to explain."""
MOST_MEMBERS = 512
"""Most members of the search for the least expected step; with more, a Newton step takes seconds."""
_LEAST_VARIATION = 1e-3
"""Least relative deviation inside the search, which needs smooth curves."""
_EXCHANGES = 64
"""Most single granules that move between two members after rounding."""
_CANDIDATES = 3
"""Givers and takers compared for each of these moves."""

_ALONE = CommunicationTime()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSplit:
    """A division with its expected step.

    Attributes:
        split: the shares, with the times of members without noise.
        expected_s: mean seconds of the step under noise.
        balanced_s: the same for the balanced shares; equal to ``expected_s`` where these are kept.
    """

    split: Split
    expected_s: float
    balanced_s: float


def expected_step_s(split: Split, variations: Sequence[float], *, hiccups: Hiccups = NO_HICCUPS) -> float:
    """Return the mean seconds of a step: the mean of the maximum over members whose own times vary.

    Args:
        split: shares and times.
        variations: standard deviation of each member's own compute seconds relative to their mean, by rank, without
            hiccups.
        hiccups: of every member.
    """
    deviations = [variation * own for variation, own in zip(variations, split.own_s, strict=True)]
    return expected_maximum(split.member_s, deviations, hiccups=hiccups, own_s=split.own_s)


def balance_expected(
    total_samples: int,
    members: Sequence[SplitMember],
    variations: Sequence[float],
    *,
    communication: CommunicationTime = _ALONE,
    hiccups: Hiccups = NO_HICCUPS,
) -> ExpectedSplit | Infeasible:
    """Return whole shares with the least expected step; never worse than the balanced shares.

    The real-valued problem is convex without accumulation and solved to ``least_expected.TOLERANCE``. Its shares are
    rounded, and single granules move while that helps. Where micro-batches or tables make the problem non-convex, the
    answer is still no worse than the balanced one.

    Args:
        total_samples: the global batch, at least 1.
        members: by rank.
        variations: standard deviation of each member's own compute seconds relative to their mean, by rank; finite.
        communication: T_o and T_u in seconds, gamma in [0, 1].
        hiccups: of every member.
    """
    even = balance(total_samples, members, communication=communication)
    if isinstance(even, Infeasible):
        return even
    balanced_s = expected_step_s(even, variations, hiccups=hiccups)
    kept = ExpectedSplit(split=even, expected_s=balanced_s, balanced_s=balanced_s)
    alike = max(variations) - min(variations) <= _LEAST_VARIATION
    if alike or not 1 < len(members) <= MOST_MEMBERS or len({m.granularity_samples for m in members}) > 1:
        return kept
    timing = Timing(members, communication, total_samples)
    variation_W: Floats = np.array(variations, dtype=float)
    low_W, high_W = timing.lo_W.astype(float), timing.hi_W.astype(float)
    real = least_expected(
        _curves_of(timing, variation_W),
        start_W=_start(np.array(even.shares, dtype=float), variation_W, low_W, high_W),
        low_W=low_W,
        high_W=high_W,
        goal_s=balanced_s * (1 - LEAST_GAIN_RATIO),
        hiccups=hiccups,
    )
    if real.expected_s >= balanced_s * (1 - LEAST_GAIN_RATIO):
        return kept
    rounded_W = _rounded(real.shares_W, timing, total_samples)
    shares_W, expected_s = _exchanged(rounded_W, timing, variation_W, hiccups)
    if expected_s >= balanced_s * (1 - LEAST_GAIN_RATIO):
        return kept
    split = describe(timing, members, shares_W[None, :])[0]
    return ExpectedSplit(split=split, expected_s=expected_s, balanced_s=balanced_s)


def efficiency_ceiling(variations: Sequence[float], rates: Sequence[float], *, hiccups: Hiccups = NO_HICCUPS) -> float:
    """Return the efficiency that no shares exceed on average, in (0, 1].

    Efficiency is the achieved rate divided by the sum of the solo rates ``r_i``. With own mean times ``y_i`` it is at
    most ``sum(r_i y_i) / (sum(r_i) E max_i y_i (1 + v_i z_i))``, so the ceiling follows from the least mean of the
    maximum at ``sum(r_i y_i) = sum(r_i)``. Its proved lower bound is used, so the result is never too low. Exchange,
    limits and whole samples only lower what can be reached.

    Args:
        variations: standard deviation of each member's compute seconds relative to their mean; at least one.
        rates: samples per second of each member alone, positive.
        hiccups: of every member, in units of the mean own time: the batch over the sum of the solo rates.
    """
    variation_W: Floats = np.array(variations, dtype=float)
    rate_W: Floats = np.array(rates, dtype=float) / float(np.sum(rates)) * len(rates)
    if len(rates) == 1 or float(variation_W.max()) <= _LEAST_VARIATION:
        return 1.0 / max(1.0, expected_maximum([1.0] * len(rates), variations, hiccups=hiccups))
    smooth_W = np.maximum(variation_W, _LEAST_VARIATION)
    slope_W = 1.0 / rate_W

    def curves(shares_W: Floats) -> Curves:
        mean_W = shares_W * slope_W
        return Curves(mean_W, mean_W * smooth_W, slope_W, slope_W * smooth_W, mean_W, slope_W)

    high_W = np.full(len(rate_W), float(rate_W.sum()))
    least = least_expected(
        curves,
        start_W=_start(rate_W, variation_W, 0 * rate_W, high_W),
        low_W=_LEAST_VARIATION * rate_W,
        high_W=high_W,
        hiccups=hiccups,
    )
    # Smoothing adds at most the mean of the largest added deviation: E max of n normal ones is below sqrt(2 ln n).
    added = _LEAST_VARIATION if bool(np.any(variation_W < _LEAST_VARIATION)) else 0.0
    return 1.0 / max(1.0, least.bound_s - added * math.sqrt(2 * math.log(len(rate_W))))


def _start(balanced_W: Floats, variation_W: Floats, low_W: Floats, high_W: Floats) -> Floats:
    """Return shares whose members would end together if each were one deviation late: close to the best ones."""
    total = float(balanced_W.sum())
    start_W = np.clip(balanced_W / (1 + variation_W), low_W, high_W)
    missing = total - float(start_W.sum())
    room_W = high_W - start_W if missing > 0 else start_W - low_W
    weight_W = np.minimum(room_W, balanced_W) if missing > 0 else room_W
    whole = float(weight_W.sum())
    # Without any room, limits leave a single division: the balanced one.
    return start_W + weight_W * (missing / whole) if whole > 0 and whole >= abs(missing) else balanced_W


def _curves_of(timing: Timing, variation_W: Floats) -> Callable[[Floats], Curves]:
    """Return times at real-valued shares: straight lines between whole granules."""
    granularity_W = timing.granularity_W
    last_W = np.maximum(timing.hi_W - granularity_W, timing.lo_W)

    def curves(shares_W: Floats) -> Curves:
        whole_W = (shares_W / granularity_W).astype(np.int64) * granularity_W
        below_W = np.clip(whole_W, timing.lo_W, last_W)
        above_W = np.minimum(below_W + granularity_W, timing.hi_W)
        part_W = (shares_W - below_W) / granularity_W
        both_2W = np.stack([below_W, above_W])
        (step_W, next_step_W), (own_W, next_own_W) = timing.step_s(both_2W), timing.own_s(both_2W)
        more_step_W, more_own_W = next_step_W - step_W, next_own_W - own_W
        mean_W, own_at_W = step_W + part_W * more_step_W, own_W + part_W * more_own_W
        least_s = _LEAST_VARIATION * float(mean_W.max())
        deviation_W = variation_W * own_at_W
        return Curves(
            mean_W,
            np.maximum(deviation_W, least_s),
            more_step_W / granularity_W,
            np.where(deviation_W > least_s, variation_W * more_own_W / granularity_W, 0.0),
            own_at_W,
            more_own_W / granularity_W,
        )

    return curves


def _rounded(real_W: Floats, timing: Timing, total: int) -> Ints:
    """Return whole granules within the limits, by largest remainder."""
    granularity = int(timing.granularity_W[0])
    whole_W: Ints = np.clip((real_W / granularity).astype(np.int64) * granularity, timing.lo_W, timing.hi_W)
    missing = (total - int(whole_W.sum())) // granularity
    sign = 1 if missing > 0 else -1
    order = np.argsort(-sign * (real_W - whole_W), kind="stable")
    while missing:
        for index in order.tolist():
            moved = int(whole_W[index]) + sign * granularity
            if missing and int(timing.lo_W[index]) <= moved <= int(timing.hi_W[index]):
                whole_W[index] = moved
                missing -= sign
    return whole_W


def _exchanged(shares_W: Ints, timing: Timing, variation_W: Floats, hiccups: Hiccups) -> tuple[Ints, float]:
    """Return shares that no move of one granule among the likeliest pairs improves, and their expected seconds."""
    granularity = int(timing.granularity_W[0])
    best_W, best_s = shares_W, _roughly(shares_W, timing, variation_W, hiccups)
    for _ in range(_EXCHANGES):
        deviation_W = variation_W * timing.own_s(best_W)
        late_W = timing.step_s(best_W) + deviation_W
        givers = [int(i) for i in np.argsort(-late_W, kind="stable") if best_W[i] > timing.lo_W[i]][:_CANDIDATES]
        takers = [int(i) for i in np.argsort(late_W, kind="stable") if best_W[i] < timing.hi_W[i]][:_CANDIDATES]
        found = None
        for giver in givers:
            for taker in takers:
                if giver == taker:
                    continue
                tried_W = best_W.copy()
                tried_W[giver] -= granularity
                tried_W[taker] += granularity
                tried_s = _roughly(tried_W, timing, variation_W, hiccups)
                if tried_s < best_s * (1 - 1e-9):
                    found, best_s = tried_W, tried_s
        if found is None:
            break
        best_W = found
    return best_W, _expected(best_W, timing, variation_W, hiccups)


def _roughly(shares_W: Ints, timing: Timing, variation_W: Floats, hiccups: Hiccups) -> float:
    """Return the expected seconds on the grid of the search: exact enough to compare, and several times faster."""
    step_W, own_W = timing.step_s(shares_W), timing.own_s(shares_W)
    least_s = _LEAST_VARIATION * float(step_W.max())
    return value_alone(step_W, np.maximum(variation_W * own_W, least_s), own_W, hiccups)


def _expected(shares_W: Ints, timing: Timing, variation_W: Floats, hiccups: Hiccups) -> float:
    own_W = timing.own_s(shares_W)
    return expected_maximum(
        timing.step_s(shares_W).tolist(), (variation_W * own_W).tolist(), hiccups=hiccups, own_s=own_W.tolist()
    )
