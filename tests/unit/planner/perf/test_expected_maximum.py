"""The mean of a maximum, against chance and against the two-variable closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from heterotrain_planner.perf.expected_maximum import balanced_ceiling, expected_maximum


def test_two_variables_have_a_closed_form() -> None:
    """Clark (1961) is exact for two normal variables, and so are we."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        m1, m2 = rng.uniform(0.5, 2, 2)
        s1, s2 = rng.uniform(0.001, 0.5, 2)
        a = math.hypot(s1, s2)
        z = (m1 - m2) / a
        below = 0.5 * math.erfc(-z / math.sqrt(2))
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        clark = m1 * below + m2 * (1 - below) + a * density
        assert expected_maximum([m1, m2], [s1, s2]) == pytest.approx(clark, abs=1e-3 * max(s1, s2))


def test_many_different_variables_match_random_draws() -> None:
    """Forty members of different means and deviations: within the error of 200,000 draws."""
    rng = np.random.default_rng(2)
    means, deviations = rng.uniform(0.8, 1.0, 40), rng.uniform(0, 0.15, 40)
    draws = (means + deviations * rng.standard_normal((200_000, 40))).max(axis=1)
    error = float(draws.std() / math.sqrt(len(draws)))
    assert expected_maximum(means.tolist(), deviations.tolist()) == pytest.approx(float(draws.mean()), abs=5 * error)


def test_without_spread_it_is_the_maximum() -> None:
    """No noise, or one member: the longest mean."""
    assert expected_maximum([1.0, 3.0, 2.0], [0.0, 0.0, 0.0]) == pytest.approx(3.0, rel=1e-6)
    assert expected_maximum([2.0], [0.3]) == pytest.approx(2.0, rel=1e-4)
    assert expected_maximum([1.0, 100.0], [0.1, 0.0]) == pytest.approx(100.0, rel=1e-6)


@pytest.mark.parametrize(("variation", "ceiling"), [(0.05, 0.96), (0.08, 0.94), (0.13, 0.90), (0.0, 1.0)])
def test_the_ceiling_of_three_balanced_members(variation: float, ceiling: float) -> None:
    """What noise alone costs three balanced members."""
    assert balanced_ceiling([variation] * 3) == pytest.approx(ceiling, abs=0.005)
