"""Weights for outlier samples: least variance by an independent derivation, and deviations by simulation."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from heterotrain.numerics.noise_scale import NoiseAverage, estimate
from heterotrain.numerics.outlier_samples import MOST_KURTOSIS_RATIO, Kurtosis, RankSquares, estimate_by_rank
from hypothesis import given
from hypothesis import strategies as st
from support.noise_weights import Floats, local_estimates, uniform_weights
from support.repeat import times

DIMENSIONS = 60
WARM_UP = 200
"""Steps that are not judged."""


def ranks_of(groups: list[tuple[int, float]], weighted: list[float]) -> list[RankSquares]:
    """Return ranks with a number of groups of one size each."""
    return [
        RankSquares(weighted=own, groups=number, samples=number * size)
        for (number, size), own in zip(groups, weighted, strict=True)
    ]


def covariance_of(sizes: Floats, *, kappa: float, phi: float | None) -> Floats:
    """Return the covariance matrix of ``|g_j|^2 - |g|^2``.

    In units of ``2 tr(Sigma^2)``, with ``G'SG = tr(Sigma^2) / phi`` for noise without a preferred direction:
    ``Var |g_j|^2 = 2 / (phi b) + 1 / b^2 + kappa / b^3``, and ``|g|^2`` holds ``p^2 |g_j|^2`` and
    ``2 p (1 - p) G'g_j`` of it, with ``p = b / B``.
    """
    total = sizes.sum()
    part = sizes / total
    line = 0.0 if phi is None else 2 / phi
    own = line / sizes + 1 / sizes**2 + kappa / sizes**3
    with_whole = part**2 * own + part * (1 - part) * line / sizes
    whole = line / total + 1 / total**2 + kappa / total**3
    found: Floats = np.diag(own) - with_whole[:, None] - with_whole[None, :] + whole
    return found


def best_weights(sizes: Floats, *, kappa: float, phi: float | None) -> Floats:
    """Return the weights ``c`` of ``|g_j|^2 - |g|^2`` of least variance for tr(Sigma), by a general inverse."""
    inverse = np.linalg.pinv(covariance_of(sizes, kappa=kappa, phi=phi), rcond=1e-14, hermitian=True)
    unbiased = 1 / sizes - 1 / sizes.sum()
    return inverse @ unbiased / (unbiased @ inverse @ unbiased)  # type: ignore[no-any-return]  # numpy leaves it open


def weights_of(sizes: list[float], *, kappa: float, phi: float | None) -> Floats:
    """Return the weights of ``estimate_by_rank``, from its answers to unit squares."""
    found = []
    for own in range(len(sizes)):
        squares = [size if own == other else 0.0 for other, size in enumerate(sizes)]
        sample = estimate_by_rank(
            ranks_of([(1, size) for size in sizes], squares),
            total_squared=0.0, kurtosis_samples=kappa, noise_samples=phi,
        )  # fmt: skip
        assert sample is not None
        found.append(sample.variance)
    return np.array(found)


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_the_weights_have_the_least_variance(seed: int) -> None:
    """Compared with a general solution of the same problem, for any number and size of groups."""
    rng = random.Random(seed)  # noqa: S311  # seeded chance
    groups = [(rng.randint(1, 3), float(rng.choice([1, 2, 5, 17, 64, 300]))) for _ in range(rng.randint(2, 6))]
    batch = sum(number * size for number, size in groups)
    kappa = rng.choice([0.01, 0.3, 1.0, 5.0, MOST_KURTOSIS_RATIO]) * batch
    phi = rng.choice([None, 0.02 * batch, batch, 50 * batch])
    each = np.array([size for number, size in groups for _ in range(number)])
    expected = best_weights(each, kappa=kappa, phi=phi)
    last = 0
    for rank, (number, size) in enumerate(groups):
        found = estimate_by_rank(
            ranks_of(groups, [size * number if rank == other else 0.0 for other in range(len(groups))]),
            total_squared=0.0, kurtosis_samples=kappa, noise_samples=phi,
        )  # fmt: skip
        assert found is not None
        assert found.variance == pytest.approx(expected[last : last + number].sum(), rel=1e-5)
        last += number


def test_never_more_deviation_than_plain_averaging_or_the_closed_form() -> None:
    """On 2,000 random shares, tails and noise scales, by exact variances; also where the kurtosis is off by two.

    Plain averaging gives each group's own estimate the same weight. What it costs to know the kurtosis badly is
    bounded, too: by 5 % with a factor of two.
    """
    rng = np.random.default_rng(7)
    gains = []
    for _ in range(2000):
        sizes = np.round(np.exp(rng.uniform(0, math.log(200), rng.integers(2, 8))))
        batch = float(sizes.sum())
        kappa, phi = batch * 10 ** rng.uniform(-2, 2), batch * 10 ** rng.uniform(-1, 1)
        covariance = covariance_of(sizes, kappa=kappa, phi=phi)

        def deviation(weights: Floats, covariance: Floats = covariance) -> float:
            return math.sqrt(float(weights @ covariance @ weights))

        plain, closed = deviation(sizes / (1 - sizes / batch) / len(sizes)), deviation(sizes / (len(sizes) - 1))
        for error in (0.5, 1.0, 2.0):
            own = deviation(weights_of(sizes.tolist(), kappa=error * kappa, phi=phi))
            exact = error == 1.0 and kappa <= MOST_KURTOSIS_RATIO * batch
            assert own <= (1 + 1e-6 if exact else 1.06) * min(plain, closed)
            gains.append(own / plain)
    assert np.median(gains) < 0.8


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(1, 200)), min_size=2, max_size=6), st.floats(0, 1e4), st.data())
def test_without_bias_for_any_kurtosis(groups: list[tuple[int, float]], kappa: float, data: st.DataObject) -> None:
    """Expected squares give the true values, also where a rank's groups differ in size."""
    gradient, trace = 2.0, 300.0
    sizes = [[size * data.draw(st.sampled_from([0.5, 1.0])) for _ in range(number)] for number, size in groups]
    batch = math.fsum(map(math.fsum, sizes))
    ranks = [
        RankSquares(weighted=sum(b * gradient + trace for b in own), groups=len(own), samples=math.fsum(own))
        for own in sizes
    ]
    found = estimate_by_rank(
        ranks, total_squared=gradient + trace / batch, kurtosis_samples=kappa, noise_samples=trace / gradient
    )
    assert found is not None
    assert (found.gradient_squared, found.variance) == (pytest.approx(gradient, rel=1e-6), pytest.approx(trace))


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(1, 200), st.floats(0, 9)), min_size=2, max_size=6))
def test_without_outlier_samples_it_is_the_closed_form(rows: list[tuple[int, float, float]]) -> None:
    """Digit for digit, so Gaussian gradients lose nothing before outlier samples are seen."""
    ranks = [RankSquares(weighted=w, groups=n, samples=n * size) for n, size, w in rows]
    assert estimate_by_rank(ranks, total_squared=0.5) == estimate(
        weighted_squares=math.fsum(r.weighted for r in ranks), total_squared=0.5,
        samples=math.fsum(r.samples for r in ranks), groups=sum(r.groups for r in ranks),
    )  # fmt: skip


def drawn(shares: tuple[int, ...], kind: str, steps: int) -> tuple[Floats, Floats, float]:
    """Return squared norms of group means ``(steps, groups)`` and of the whole, and the true tr(Sigma).

    Every sample has its own scale: constant, of a t-distribution with 5 degrees of freedom, 1 % of samples ten times as
    long, or log-normal.
    """
    rng = np.random.default_rng([len(kind), *shares])
    scales = {
        "Gaussian": np.ones,
        "Student": lambda size: 3 / rng.chisquare(5, size),
        "outliers": lambda size: np.where(rng.random(size) < 0.01, 100.0, 1.0) / 1.99,
        "log-normal": lambda size: np.exp(1.5 * rng.standard_normal(size) - 1.5**2 / 2),
    }[kind]
    total = sum(shares)
    squares, whole = np.empty((steps, len(shares))), np.zeros((steps, DIMENSIONS))
    for group, b in enumerate(shares):
        deviation = np.sqrt(scales((steps, b)).sum(1)[:, None] / b**2 * total / DIMENSIONS)
        mean = 1 / math.sqrt(DIMENSIONS) + deviation * rng.standard_normal((steps, DIMENSIONS))
        squares[:, group] = (mean**2).sum(1)
        whole += mean * (b / total)
    return squares, (whole**2).sum(1), float(total)


def deviations(shares: tuple[int, ...], kind: str, *, steps: int) -> dict[str, float]:
    """Return the relative deviation of tr(Sigma) by closed form, plain averaging and learned kurtosis."""
    squares, whole, trace = drawn(shares, kind, steps)
    batch = sum(shares)
    average, kurtosis = NoiseAverage(), Kurtosis()
    found: dict[str, list[float]] = {"closed": [], "plain": [], "learned": []}
    for square, total in zip(squares.tolist(), whole.tolist(), strict=True):
        ranks = [RankSquares(weighted=b * own, groups=1, samples=b) for b, own in zip(shares, square, strict=True)]
        before, phi = average.corrected(), average.scale()
        learned = estimate_by_rank(ranks, total_squared=total, kurtosis_samples=kurtosis.samples(), noise_samples=phi)
        closed = estimate_by_rank(ranks, total_squared=total)
        assert learned is not None
        assert closed is not None
        if before is not None:
            kurtosis = kurtosis.after(ranks, total_squared=total, variance=before.variance, noise_samples=phi)
        average = average.after(learned, samples=batch, base_samples=batch)
        found["closed"].append(closed.variance)
        found["learned"].append(learned.variance)
        found["plain"].append(float(local_estimates(shares, square, total)[1] @ uniform_weights(shares)))
    return {name: float(np.std(values[WARM_UP:])) / trace for name, values in found.items()}


@pytest.mark.parametrize("shares", [(10, 90), (1, 2, 200), (4, 8, 16, 100)])
def test_gaussian_gradients_lose_nothing(shares: tuple[int, ...]) -> None:
    """Within half a per cent of the closed form, which has the least variance."""
    found = deviations(shares, "Gaussian", steps=1000)
    assert found["learned"] <= 1.005 * found["closed"] < 1.005 * found["plain"]


@pytest.mark.parametrize("kind", ["Student", "outliers", "log-normal"])
@pytest.mark.parametrize("shares", [(5, 15, 30, 50), (4, 8, 16, 100)])
def test_outlier_samples_do_not_deviate_more_than_plain_averages(shares: tuple[int, ...], kind: str) -> None:
    """The closed form has more deviation than plain averaging; with learned kurtosis it is not above either."""
    found = deviations(shares, kind, steps=1000)
    assert found["closed"] > 1.05 * found["plain"], "otherwise there is nothing to gain"
    assert found["learned"] < 1.02 * found["plain"]


def learned_from(shares: tuple[int, ...], squares: list[float], total: float, steps: int) -> Kurtosis:
    """Return what many equal steps teach."""
    kurtosis = Kurtosis()
    ranks = [RankSquares(weighted=b * own, groups=1, samples=b) for b, own in zip(shares, squares, strict=True)]
    for _ in range(steps):
        kurtosis = kurtosis.after(ranks, total_squared=total, variance=10.0)
    return kurtosis


def test_nothing_is_learned_from_groups_of_one_size() -> None:
    """Their distances say nothing about the size; few steps say nothing either."""
    assert learned_from((8, 8, 8), [9.0, 1.0, 1.0], 1.0, 100).samples() == 0.0
    assert learned_from((1, 20, 80), [500.0, 1.5, 1.1], 1.0, 100).samples() > 0.0
    assert learned_from((1, 20, 80), [500.0, 1.5, 1.1], 1.0, 20).samples() == 0.0


@pytest.mark.parametrize(
    "broken",
    [
        {"weighted": math.nan}, {"weighted": math.inf}, {"weighted": 1.7e308}, {"samples": 1e300},
        {"samples": 1e-300}, {"samples": math.inf}, {"groups": 0}, {"samples": 0.0},
    ],
)  # fmt: skip
def test_broken_squares_stop_nothing(broken: dict[str, Any]) -> None:
    """The step has no estimate, or the closed form's; what was learned stays finite."""
    before = learned_from((1, 20, 80), [500.0, 1.5, 1.1], 1.0, 100)
    fields: dict[str, Any] = {"weighted": 9.0, "groups": 1, "samples": 4.0}
    for other in (fields, fields | broken):
        ranks = [RankSquares(**(fields | broken)), RankSquares(**other)]
        found = estimate_by_rank(ranks, total_squared=1e308, kurtosis_samples=5.0, noise_samples=0.0)
        assert found is None or not math.isnan(found.variance)
        after = before.after(ranks, total_squared=1e308, variance=1e-300, noise_samples=0.0)
        assert after.samples() >= 0
        assert math.isfinite(after.gaussian_distance + after.outlier_distance)
