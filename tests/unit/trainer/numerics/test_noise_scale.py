"""The noise-scale estimator: unbiased, of least variance on a grid, averaged right, guarded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from heterotrain.numerics.noise_scale import (
    LEAST_BATCHES,
    MOST_BATCHES,
    NoiseAverage,
    NoiseSample,
    estimate,
    noise_scale,
)
from hypothesis import given
from hypothesis import strategies as st
from support.noise_weights import least_variance_weights, local_estimates, published_weights, uniform_weights

DIMENSIONS = 120
GRID = [
    (shares, ratio, spread)
    for shares in (
        (10, 90),
        (50, 50),
        (5, 15, 30, 50),
        (100, 20, 20, 20, 20, 20),
        (64,) * 4 + (32,) * 4 + (16,) * 8,
        (1, 2, 200),
    )
    for ratio in (0.2, 1.0, 20.0)
    for spread in ("isotropic", "anisotropic")
]


def drawn(
    shares: tuple[int, ...], ratio: float, spread: str, draws: int
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Return squared norms of group means ``(draws, groups)`` and of the whole, and the true |G|^2 and tr(Sigma)."""
    rng = np.random.default_rng(len(shares) * 100 + int(10 * ratio))
    b = np.array(shares, dtype=float)
    scale = np.ones(DIMENSIONS) if spread == "isotropic" else 1.0 / np.arange(1, DIMENSIONS + 1)
    mean = np.full(DIMENSIONS, 1.0 / math.sqrt(DIMENSIONS))
    trace = ratio * b.sum()
    deviation = np.sqrt(scale / scale.sum() * trace)
    noise = rng.standard_normal((draws, len(b), DIMENSIONS)).astype(np.float32)
    groups = mean + noise * deviation / np.sqrt(b)[None, :, None]
    whole = (groups * (b / b.sum())[None, :, None]).sum(axis=1)
    return (groups**2).sum(axis=2), (whole**2).sum(axis=1), 1.0, trace


@pytest.mark.parametrize(("shares", "ratio", "spread"), GRID)
def test_unbiased_and_never_of_larger_variance(shares: tuple[int, ...], ratio: float, spread: str) -> None:
    """Against equal weights and the published ones: no bias, and no larger variance of either part."""
    squares, whole, gradient, trace = drawn(shares, ratio, spread, 2000)
    total = float(sum(shares))
    ours = [
        estimate(
            weighted_squares=float(s @ np.array(shares)), total_squared=float(w), samples=total, groups=len(shares)
        )
        for s, w in zip(squares, whole, strict=True)
    ]
    mine = np.array([(x.gradient_squared, x.variance) for x in ours if x is not None])
    local = [local_estimates(shares, s.tolist(), float(w)) for s, w in zip(squares, whole, strict=True)]
    of_gradient, of_variance = np.array([x[0] for x in local]), np.array([x[1] for x in local])
    rivals = {
        "uniform": (of_gradient @ uniform_weights(shares), of_variance @ uniform_weights(shares)),
        "published": tuple(x @ w for x, w in zip((of_gradient, of_variance), published_weights(shares), strict=True)),
    }
    for column, truth in ((0, gradient), (1, trace)):
        error = mine[:, column].std() / math.sqrt(len(mine))
        assert abs(mine[:, column].mean() - truth) < 4.5 * error
        for name, rival in rivals.items():
            # Paired draws: the tolerance is for the float32 of the draws and the ratio's own error.
            assert mine[:, column].std() <= rival[column].std() * 1.02, (name, column)


def test_the_published_weights_are_worse_than_plain_averaging_beyond_two_members() -> None:
    """The reason for not using them: a fifth more deviation at four members, and less only at two."""
    for shares, worse in (((5, 15, 30, 50), True), ((10, 90), False)):
        squares, whole, _, _ = drawn(shares, 1.0, "isotropic", 3000)
        local = np.array(
            [local_estimates(shares, s.tolist(), float(w))[0] for s, w in zip(squares, whole, strict=True)]
        )
        ratio = (local @ published_weights(shares)[0]).std() / (local @ uniform_weights(shares)).std()
        assert (ratio > 1.2) if worse else (ratio < 0.9)


@given(
    st.lists(st.floats(1, 100), min_size=2, max_size=6),
    st.lists(st.floats(0, 10), min_size=6, max_size=6),
    st.floats(0, 10),
)
def test_the_closed_form_is_the_weighted_sum_of_local_estimates(
    shares: list[float], squares: list[float], whole: float
) -> None:
    """One scalar all-reduce gives the same as the least-variance weights."""
    squares = squares[: len(shares)]
    together = estimate(
        weighted_squares=sum(b * s for b, s in zip(shares, squares, strict=True)),
        total_squared=whole,
        samples=sum(shares),
        groups=len(shares),
    )
    assert together is not None
    of_gradient, of_variance = local_estimates(shares, squares, whole)
    weights = least_variance_weights(shares)
    assert weights.sum() == pytest.approx(1.0)
    assert together.gradient_squared == pytest.approx(float(weights @ of_gradient), rel=1e-6, abs=1e-6)
    assert together.variance == pytest.approx(float(weights @ of_variance), rel=1e-6, abs=1e-5)


def test_one_group_or_broken_sums_give_nothing() -> None:
    """A single micro-batch has no spread; a NaN from a loss scale gives no estimate."""
    assert estimate(weighted_squares=1.0, total_squared=1.0, samples=8, groups=1) is None
    assert estimate(weighted_squares=math.nan, total_squared=1.0, samples=8, groups=4) is None
    assert estimate(weighted_squares=1.0, total_squared=math.inf, samples=8, groups=4) is None


def test_averages_are_unbiased_from_the_first_step_and_follow_the_batch() -> None:
    """Bias-corrected; a step of ten base batches forgets as much as ten steps; non-finite values are skipped."""
    one = NoiseSample(gradient_squared=2.0, variance=50.0)
    first = NoiseAverage().after(one, samples=64, base_samples=64)
    assert NoiseAverage().corrected() is None
    assert first.corrected() == NoiseSample(gradient_squared=pytest.approx(2.0), variance=pytest.approx(50.0))
    ten = NoiseAverage()
    for _ in range(10):
        ten = ten.after(one, samples=64, base_samples=64)
    big = NoiseAverage().after(one, samples=640, base_samples=64)
    assert big.weight == pytest.approx(ten.weight)
    broken = NoiseSample(gradient_squared=math.nan, variance=1.0)
    assert first.after(broken, samples=64, base_samples=64) == first


def test_half_of_the_averages_is_forgotten_in_693_base_batches() -> None:
    """After a long time at one value, ``ln 2 / -ln 0.999 = 693`` base batches of another count as much."""
    average = NoiseAverage()
    for variance, base_batches in ((8.0, 20_000), (2.0, 693)):
        for _ in range(base_batches // 7):
            sample = NoiseSample(gradient_squared=variance / 2, variance=variance)
            average = average.after(sample, samples=7 * 32, base_samples=32)
    found = average.corrected()
    assert found is not None
    assert (found.variance, found.gradient_squared) == (pytest.approx(5.0, abs=0.01), pytest.approx(2.5, abs=0.005))


def test_the_ratio_is_of_averages_and_converges() -> None:
    """The ratio of averages finds phi where the average of ratios does not even have a mean."""
    squares, whole, gradient, trace = drawn((32, 16, 8), 2.0, "isotropic", 3000)
    average = NoiseAverage()
    for s, w in zip(squares, whole, strict=True):
        found = estimate(
            weighted_squares=float(s @ np.array([32, 16, 8])), total_squared=float(w), samples=56, groups=3
        )
        assert found is not None
        average = average.after(found, samples=56, base_samples=56)
    assert noise_scale(average.corrected(), samples=56) == pytest.approx(trace / gradient, rel=0.1)


@pytest.mark.parametrize("samples", [64, 640])
def test_a_few_steps_give_no_noise_scale(samples: int) -> None:
    """Ten base batches have to be seen first, in ten steps or in one."""
    average, base_batches = NoiseAverage(), 0
    while average.scale() is None:
        average = average.after(NoiseSample(gradient_squared=2.0, variance=50.0), samples=samples, base_samples=64)
        base_batches += samples // 64
    assert base_batches == LEAST_BATCHES
    assert average.scale() == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("gradient", "variance", "expected"),
    [
        (2.0, 50.0, 25.0),
        (0.0, 50.0, MOST_BATCHES * 64),
        (-1.0, 50.0, MOST_BATCHES * 64),
        (1e-30, 1.0, MOST_BATCHES * 64),
        (1.0, -0.5, 0.0),
        (-1.0, -1.0, None),
        (math.nan, 1.0, None),
    ],
)
def test_the_ratio_is_guarded(gradient: float, variance: float, expected: float | None) -> None:
    """Chance may turn either part negative; phi stays between zero and a stated limit, or is unknown."""
    assert noise_scale(NoiseSample(gradient_squared=gradient, variance=variance), samples=64) == expected
    assert noise_scale(None, samples=64) is None
