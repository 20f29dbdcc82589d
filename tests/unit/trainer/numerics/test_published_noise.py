"""The published weights as an option: against the published matrices, solved by numpy, and against their variance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from heterotrain.numerics.noise_scale import NoiseSample
from heterotrain.numerics.outlier_samples import RankSquares
from heterotrain.numerics.published_noise import estimate_as_published
from support.noise_weights import local_estimates, published_weights
from support.repeat import times


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_the_estimates_are_those_of_the_published_matrices(seed: int) -> None:
    """Up to eight ranks of one to three groups; the groups of a rank are only known by the sum of their squares."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, int(rng.integers(2, 9))).tolist()
    sizes = np.exp(rng.uniform(0, 5, len(counts))).tolist()
    squares = [rng.uniform(0.5, 3, count) for count in counts]
    whole = float(rng.uniform(0.1, 2))
    ranks = [
        RankSquares(weighted=size * float(each.sum()), groups=count, samples=size * count)
        for size, count, each in zip(sizes, counts, squares, strict=True)
    ]
    found = estimate_as_published(ranks, total_squared=whole)
    assert found is not None
    shares = [size for size, count in zip(sizes, counts, strict=True) for _ in range(count)]
    local = local_estimates(shares, np.concatenate(squares).tolist(), whole)
    of_gradient, of_variance = (float(x @ w) for x, w in zip(local, published_weights(shares), strict=True))
    scale = max(float(np.abs(x).max()) for x in local)
    assert found.gradient_squared == pytest.approx(of_gradient, rel=1e-6, abs=1e-9 * scale)
    assert found.variance == pytest.approx(of_variance, rel=1e-6, abs=1e-9 * scale)


def test_order_of_ranks_changes_no_digit() -> None:
    """Every rank computes the same value, whatever it lists first."""
    ranks = [RankSquares(weighted=3.7 * n, groups=1 + n % 3, samples=float(n)) for n in (5, 15, 30, 50, 7)]
    assert estimate_as_published(ranks, total_squared=1.3) == estimate_as_published(ranks[::-1], total_squared=1.3)


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [RankSquares(weighted=1.0, groups=1, samples=8.0)],
        [RankSquares(weighted=1.0, groups=1, samples=8.0), RankSquares(weighted=0.0, groups=0, samples=0.0)],
        [RankSquares(weighted=math.nan, groups=1, samples=8.0), RankSquares(weighted=1.0, groups=1, samples=8.0)],
        [RankSquares(weighted=math.inf, groups=1, samples=8.0), RankSquares(weighted=1.0, groups=1, samples=8.0)],
        [RankSquares(weighted=1.0, groups=1, samples=1e-9), RankSquares(weighted=1.0, groups=1, samples=1e9)],
    ],
)
def test_without_an_estimate_there_is_none(ranks: list[RankSquares]) -> None:
    """One group, broken gradients, and parts too small for the formulas."""
    assert estimate_as_published(ranks, total_squared=1.0) is None
    assert estimate_as_published([RankSquares(weighted=2.0, groups=2, samples=8.0)], total_squared=math.nan) is None


def test_two_equal_ranks_leave_no_choice() -> None:
    """All weights are equal, so the estimates are those of least variance."""
    ranks = [RankSquares(weighted=4.0, groups=1, samples=4.0), RankSquares(weighted=12.0, groups=1, samples=4.0)]
    found = estimate_as_published(ranks, total_squared=1.5)
    assert isinstance(found, NoiseSample)
    assert found.variance == pytest.approx((16.0 - 8 * 1.5) / 1)
    assert found.gradient_squared == pytest.approx(1.5 - found.variance / 8)
