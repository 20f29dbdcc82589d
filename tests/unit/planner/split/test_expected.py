"""Shares under noise against independent optima: a general solver, brute force, and drawn steps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Infeasible, balance, evaluate
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.perf.expected_maximum import balanced_ceiling, derivatives, expected_maximum, value_alone
from heterotrain_planner.split.expected import ExpectedSplit, balance_expected, efficiency_ceiling, expected_step_s
from heterotrain_planner.split.least_expected import TOLERANCE, Curves, least_expected
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import norm
from support.repeat import times

PUBLISHED = (
    # variations; balanced ceiling and true ceiling, both by a separate solver and by drawn steps
    ([0.05, 0.05, 0.13], 0.935, 0.937),
    ([0.02] * 3 + [0.15], 0.936, 0.945),
    ([0.02] * 2 + [0.3], 0.888, 0.903),
    ([0.02] * 7 + [0.3], 0.882, 0.933),
    ([0.03] * 12 + [0.2] * 4, 0.824, 0.892),
    ([0.05] * 9 + [0.5], 0.807, 0.888),
)


def proportional(rates: list[float], **limits: int) -> list[SplitMember]:
    return [
        SplitMember(
            compute=ComputeTime(per_sample_s=0.4 / r, fixed_s=0.0, backward_per_sample_s=0.6 / r, backward_fixed_s=0.0),
            **limits,
        )
        for r in rates
    ]


def mean_of_maximum(mean: np.ndarray, deviation: np.ndarray) -> float:
    """The mean of the maximum by a fine sum over its distribution, with scipy's normal distribution."""
    x = np.linspace(float((mean - 9 * deviation).max()), float((mean + 9 * deviation).max()), 6001)
    below = np.ones_like(x)
    for m, d in zip(mean, deviation, strict=True):
        below *= norm.cdf((x - m) / d) if d > 0 else (x >= m)
    return float(x[-1] - np.trapezoid(below, x))


@pytest.mark.parametrize(("variations", "balanced", "best"), PUBLISHED)
def test_the_ceiling_of_members_of_equal_speed(variations: list[float], balanced: float, best: float) -> None:
    assert balanced_ceiling(variations) == pytest.approx(balanced, abs=0.001)
    assert efficiency_ceiling(variations, [1.0] * len(variations)) == pytest.approx(best, abs=0.001)


@pytest.mark.parametrize("variations", [case[0] for case in PUBLISHED])
def test_shares_reach_the_ceiling(variations: list[float]) -> None:
    """Fine shares reach the ceiling within the search's tolerance, and drawn steps confirm the expected step."""
    members = proportional([1.0] * len(variations))
    total = 1000 * len(variations)
    found = balance_expected(total, members, variations)
    assert isinstance(found, ExpectedSplit)
    ceiling = efficiency_ceiling(variations, [1.0] * len(variations))
    efficiency = total / found.expected_s / found.split.solo_samples_per_s
    assert ceiling * (1 - 2e-3) <= efficiency <= ceiling * (1 + 1e-6)
    draws = np.random.default_rng(0).standard_normal((40_000, len(variations)))
    steps = (np.array(found.split.own_s) * (1 + np.array(variations) * draws)).max(axis=1)
    assert float(steps.mean()) == pytest.approx(found.expected_s, abs=5 * float(steps.std()) / 200)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_the_ceiling_is_the_optimum_of_a_general_solver(seed: int) -> None:
    """SLSQP from scipy minimises the same convex problem: it never beats the ceiling, and nearly reaches it."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    variations = rng.choice([0.01, 0.03, 0.08, 0.2, 0.4], n) * rng.uniform(0.8, 1.2, n)
    rates = rng.uniform(0.2, 2.0, n)
    ceiling = efficiency_ceiling(variations.tolist(), rates.tolist())
    assert ceiling >= balanced_ceiling(variations.tolist()) - 1e-6
    solved = minimize(
        lambda y: mean_of_maximum(y, y * variations),
        1 / (1 + variations) * rates.sum() / float(rates @ (1 / (1 + variations))),
        constraints=[{"type": "eq", "fun": lambda y: rates @ y - rates.sum()}],
        bounds=[(1e-3, 5.0)] * n,
        method="SLSQP",
        options={"maxiter": 200},
    )
    assert 1 / solved.fun <= ceiling * (1 + 1e-4)
    if solved.success:
        assert 1 / solved.fun == pytest.approx(ceiling, rel=3e-3)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_whole_shares_are_never_worse_than_balanced_ones_and_close_to_the_best(seed: int) -> None:
    """Three members, few samples: every division is tried."""
    rng = np.random.default_rng(seed)
    total = int(rng.integers(6, 24))
    variations = rng.choice([0.0, 0.02, 0.1, 0.3], 3).tolist()
    members = [
        SplitMember(
            compute=ComputeTime(
                per_sample_s=float(rng.uniform(0.01, 0.1)),
                fixed_s=float(rng.uniform(0, 0.1)),
                backward_per_sample_s=float(rng.uniform(0.01, 0.1)),
                backward_fixed_s=0.0,
            ),
            floor_samples=1,
            micro_cap_samples=None if rng.random() < 0.7 else int(rng.integers(2, 12)),
        )
        for _ in range(3)
    ]
    communication = CommunicationTime(overlapped_s=float(rng.uniform(0, 0.5)), last_bucket_s=0.05, gamma=0.3)
    found = balance_expected(total, members, variations, communication=communication)
    assert isinstance(found, ExpectedSplit)
    assert sum(found.split.shares) == total
    assert found.expected_s <= found.balanced_s
    best = math.inf
    for first, second in itertools.product(range(1, total - 1), repeat=2):
        if first + second < total:
            shares = (first, second, total - first - second)
            split = evaluate(shares, members, communication=communication)
            assert not isinstance(split, Infeasible)
            best = min(best, expected_step_s(split, variations))
    accumulates = any(m.micro_cap_samples is not None for m in members)
    assert found.expected_s <= best * (1.05 if accumulates else 1.01)


def test_equal_variations_keep_the_balanced_shares() -> None:
    members = proportional([4.0, 2.0, 1.0], floor_samples=1)
    even = balance(700, members)
    found = balance_expected(700, members, [0.1] * 3)
    assert isinstance(found, ExpectedSplit)
    assert found.split == even
    assert found.expected_s == found.balanced_s


def test_limits_hold() -> None:
    """A noisy member keeps its floor, a quiet one its cap, and granules stay whole."""
    members = proportional([1.0] * 4, floor_samples=88, cap_samples=104, granularity_samples=8)
    found = balance_expected(400, members, [0.02, 0.02, 0.02, 0.5])
    assert isinstance(found, ExpectedSplit)
    assert found.split.shares == (104, 104, 104, 88)


def test_limits_that_leave_a_single_division() -> None:
    """Members that each have to take exactly what they may take get it, whatever their noise."""
    members = [
        *proportional([1.0], floor_samples=4, cap_samples=4),
        *proportional([1.0], floor_samples=6, cap_samples=6),
    ]
    found = balance_expected(10, members, [0.0, 0.3])
    assert isinstance(found, ExpectedSplit)
    assert found.split.shares == (4, 6)


def test_an_impossible_batch_has_a_reason() -> None:
    assert isinstance(balance_expected(2, proportional([1.0] * 3, floor_samples=1), [0.1, 0.2, 0.3]), Infeasible)


def test_derivatives_are_those_of_the_mean() -> None:
    """First and second derivatives against differences of the value."""
    rng = np.random.default_rng(5)
    mean, deviation = rng.uniform(0.9, 1.1, 5), rng.uniform(0.05, 0.3, 5)
    mean_slope, deviation_slope = rng.uniform(0.5, 1.0, 5), rng.uniform(0.0, 0.2, 5)

    def value(b: np.ndarray) -> float:
        return mean_of_maximum(mean + b * mean_slope, deviation + b * deviation_slope)

    found = derivatives(mean, deviation, mean_slope, deviation_slope)
    assert found.value == pytest.approx(value(np.zeros(5)), abs=1e-5)
    second = np.diag(found.diagonal_W) - found.factor_WX @ found.factor_WX.T
    h = 3e-3
    unit = np.eye(5) * h
    for i in range(5):
        assert found.gradient_W[i] == pytest.approx((value(unit[i]) - value(-unit[i])) / (2 * h), abs=2e-4)
        for j in range(5):
            differences = value(unit[i] + unit[j]) - value(unit[i] - unit[j]) - value(unit[j] - unit[i])
            expected = (differences + value(-unit[i] - unit[j])) / (4 * h * h)
            assert second[i, j] == pytest.approx(expected, abs=0.02 * float(np.abs(second).max()))


def test_the_search_leaves_a_limit_that_was_reached_up_to_rounding() -> None:
    """A share a rounding error above its floor, which the best shares keep there: the others still find their best."""
    variation = np.array([0.5, 0.05, 0.05])
    pace = np.array([1.0, 1.0, 3.0])

    def curves(shares: np.ndarray) -> Curves:
        mean = shares * pace
        return Curves(mean, variation * mean, pace, variation * pace, mean, pace)

    low, high = np.array([40.0, 1.0, 1.0]), np.full(3, 100.0)
    found = []
    for above in (0.0, 1e-13):
        start = np.array([40.0 + above, 50.0 - above, 10.0])
        found.append(least_expected(curves, start_W=start, low_W=low, high_W=high))
    assert found[1].expected_s == pytest.approx(found[0].expected_s, rel=2 * TOLERANCE)
    assert found[1].expected_s - found[1].bound_s <= TOLERANCE * found[1].expected_s


@pytest.mark.parametrize("seed", range(times(gate=6, every=200)))
def test_steps_of_the_search_are_compared_with_the_value_of_its_derivatives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mean = rng.uniform(0.5, 1.5, int(rng.integers(2, 70)))
    deviation, slope = mean * rng.uniform(0.01, 0.3, len(mean)), np.ones(len(mean))
    hiccups = Hiccups(rate=0.02, ratio=float(rng.uniform(0, 2)), pause_s=float(rng.uniform(0, 1)))
    for each in (NO_HICCUPS, hiccups):
        value = derivatives(mean, deviation, slope, slope, hiccups=each).value
        assert value_alone(mean, deviation, mean, each) == pytest.approx(value, rel=1e-9)
        exact = expected_maximum(mean.tolist(), deviation.tolist(), hiccups=each)
        assert value == pytest.approx(exact, abs=2e-3 * float(deviation.max()))
