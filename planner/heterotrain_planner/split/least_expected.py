"""The least expected step over real-valued shares: a convex problem, solved with a proof of how good the answer is.

A step of noisy members lasts as long as the latest of them: ``E max_i (t_i(b_i) + v_i c_i(b_i) z_i)`` with independent
normal ``z_i``. The maximum of convex functions is convex, and so is its mean, so Newton steps within the limits find
the optimum. At any shares the tangent plane is a lower bound of every division's expected step: its least value, by
filling the cheapest members first, is the proof.

Legend: ``W`` members.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups

from heterotrain_planner.perf.expected_maximum import Derivatives, Floats, derivatives, value_alone

TOLERANCE = 1e-4
"""Relative gap between expected step and bound at which the search ends."""
_NEWTON_STEPS = 30
_STIFFNESS = 1e-3
"""Least second derivative in time units, relative to the largest: members that are never last have none."""
_LONGEST_MOVE = 0.5
"""Most that one Newton step moves a member's time, relative to the expected step."""
_AT_LIMIT = 1e-9
"""Distance from a limit that counts as none, relative to all samples: a step to a limit ends there up to rounding."""
_LEAST_STEP_RATIO = 1e-6
_SUFFICIENT = 1e-4
"""Part of the predicted decrease that a step has to reach (Armijo 1966)."""
_ACTIVE_SET_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Curves:
    """Mean and deviation of each member's time at its share, in seconds, and their slopes in seconds per sample.

    ``own_W`` are the seconds that hiccups refer to: compute without exchange.
    """

    mean_W: Floats
    deviation_W: Floats
    mean_slope_W: Floats
    deviation_slope_W: Floats
    own_W: Floats
    own_slope_W: Floats


@dataclass(frozen=True, slots=True)
class RealShares:
    """The best shares found.

    Attributes:
        shares_W: samples, not whole.
        expected_s: expected seconds of the step at these shares.
        bound_s: no division within the limits has an expected step below this, where the curves are convex.
    """

    shares_W: Floats
    expected_s: float
    bound_s: float


def least_expected(
    curves: Callable[[Floats], Curves],
    *,
    start_W: Floats,
    low_W: Floats,
    high_W: Floats,
    goal_s: float = math.inf,
    hiccups: Hiccups = NO_HICCUPS,
) -> RealShares:
    """Return the shares with the least expected step and the sum of ``start_W``.

    Projected Newton: the second derivatives are a diagonal minus a product, the sum of the shares stays, a share at a
    limit stays there unless the derivative points inwards, and a step is halved until the expected step decreases.

    Args:
        curves: the members' times at real-valued shares, with positive deviations.
        start_W: samples, within the limits.
        low_W: least shares.
        high_W: largest shares.
        goal_s: the search ends as soon as the bound shows that no shares reach this.
        hiccups: of every member.
    """
    shares_W, bound_s = start_W, -math.inf
    times = curves(shares_W)
    here = _at(times, hiccups)
    for _ in range(_NEWTON_STEPS):
        bound_s = max(bound_s, _bound(here, shares_W, low_W, high_W))
        if here.value - bound_s <= TOLERANCE * here.value or bound_s >= goal_s:
            break
        move_W = _newton(here, times.mean_slope_W, shares_W, low_W, high_W)
        longest_s = float(np.abs(times.mean_slope_W * move_W).max())
        if longest_s == 0:
            break
        part = min(_inside(shares_W, move_W, low_W, high_W), _LONGEST_MOVE * here.value / longest_s, 1.0)
        slope = float(here.gradient_W @ move_W)
        while part > _LEAST_STEP_RATIO:
            there_W = np.clip(shares_W + part * move_W, low_W, high_W)
            there = curves(there_W)
            there_s = value_alone(there.mean_W, there.deviation_W, there.own_W, hiccups)
            if there_s <= here.value + _SUFFICIENT * part * slope:
                break
            part /= 2
        else:
            break
        shares_W, times = there_W, there
        here = _at(times, hiccups)
    return RealShares(shares_W, here.value, max(bound_s, 0.0))


def _at(times: Curves, hiccups: Hiccups) -> Derivatives:
    return derivatives(
        times.mean_W,
        times.deviation_W,
        times.mean_slope_W,
        times.deviation_slope_W,
        hiccups=hiccups,
        own_W=times.own_W,
        own_slope_W=times.own_slope_W,
    )


def _bound(here: Derivatives, shares_W: Floats, low_W: Floats, high_W: Floats) -> float:
    """Return the least value of the tangent plane over all divisions: a lower bound, because the mean is convex."""
    order = np.argsort(here.gradient_W, kind="stable")
    room = (high_W - low_W)[order]
    before = np.concatenate(([0.0], np.cumsum(room)[:-1]))
    filled = np.clip(float(shares_W.sum() - low_W.sum()) - before, 0.0, room)
    cheapest_W = low_W.copy()
    cheapest_W[order] += filled
    return here.value + float(here.gradient_W @ (cheapest_W - shares_W))


def _newton(here: Derivatives, slope_W: Floats, shares_W: Floats, low_W: Floats, high_W: Floats) -> Floats:
    """Return the Newton step that keeps the sum, with the shares that press against a limit held there."""
    scale_W = np.maximum(slope_W, 1e-3 * slope_W.max()) ** 2
    bend_W = np.maximum(here.diagonal_W, 0.0)
    bend_W = bend_W + _STIFFNESS * max(float((bend_W / scale_W).max()), 1e-12) * scale_W
    free_W = np.ones(len(shares_W), dtype=bool)
    move_W: Floats = np.zeros(len(shares_W))
    near = _AT_LIMIT * float(shares_W.sum())
    at_low_W, at_high_W = shares_W <= low_W + near, shares_W >= high_W - near
    for _ in range(_ACTIVE_SET_ROUNDS):
        factor = here.factor_WX[free_W]
        matrix = np.diag(bend_W[free_W]) - factor @ factor.T
        sides = np.stack([here.gradient_W[free_W], np.ones(int(free_W.sum()))], axis=1)
        try:
            solved = np.linalg.solve(matrix, sides)
        except np.linalg.LinAlgError:
            return np.zeros(len(shares_W))
        total = float(solved[:, 1].sum())
        if total <= 0:
            return np.zeros(len(shares_W))
        move_W[:] = 0.0
        move_W[free_W] = solved[:, 1] * (float(solved[:, 0].sum()) / total) - solved[:, 0]
        pressed_W = free_W & ((at_low_W & (move_W < 0)) | (at_high_W & (move_W > 0)))
        if not pressed_W.any():
            return move_W
        free_W &= ~pressed_W
        if int(free_W.sum()) < 2:  # noqa: PLR2004  # one share alone cannot move
            break
    return np.zeros(len(shares_W))


def _inside(shares_W: Floats, move_W: Floats, low_W: Floats, high_W: Floats) -> float:
    """Return the largest multiple of the move that stays within the limits."""
    room_W = np.where(move_W < 0, low_W - shares_W, high_W - shares_W)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(move_W != 0, room_W / move_W, np.inf)
    return float(np.min(ratios))
