"""The noise scale from uneven shares."""

from __future__ import annotations

import numpy as np
import pytest
from heterotrain.noise import NoiseAverages, observe


def test_estimates_are_unbiased_for_uneven_shares() -> None:
    """Over many draws the means of both terms meet the true |G|^2 and tr(Sigma)."""
    random = np.random.default_rng(5)
    shares, dimension = np.array([5, 2, 9]), 30
    truth = random.normal(size=dimension) * 0.4
    spread = random.uniform(0.5, 2.5, size=dimension)
    squared, variance = [], []
    for _ in range(20_000):
        gradients = truth + random.normal(size=(3, dimension)) * spread / np.sqrt(shares)[:, None]
        whole = (shares[:, None] * gradients).sum(0) / shares.sum()
        once = observe(
            NoiseAverages(), small_squared=float((shares * (gradients**2).sum(1)).sum()), big_squared=float(whole @ whole),
            batch_samples=16, ranks=3,
        )  # fmt: skip
        assert once.gradient_squared is not None
        assert once.gradient_variance is not None
        squared.append(once.gradient_squared)
        variance.append(once.gradient_variance)
    assert np.mean(squared) == pytest.approx(truth @ truth, rel=0.03)
    assert np.mean(variance) == pytest.approx((spread**2).sum(), rel=0.01)


def test_one_rank_tells_nothing() -> None:
    """The formula divides by n - 1."""
    assert observe(NoiseAverages(), small_squared=1.0, big_squared=1.0, batch_samples=8, ranks=1) == NoiseAverages()


def test_no_scale_without_a_signal() -> None:
    """A negative estimate of |G|^2 is noise, not a scale."""
    averages = observe(NoiseAverages(), small_squared=1000.0, big_squared=0.1, batch_samples=8, ranks=2)
    assert averages.noise_scale_samples is None
    assert NoiseAverages().gradient_squared is None


def test_averages_forget() -> None:
    """After many equal observations the mean is that value, from the first one on unbiased."""
    averages = NoiseAverages()
    for _ in range(200):
        averages = observe(averages, small_squared=20.0, big_squared=2.0, batch_samples=8, ranks=2)
        assert averages.gradient_variance == pytest.approx(4.0)
        assert averages.gradient_squared == pytest.approx(1.5)
    assert averages.noise_scale_samples == pytest.approx(4.0 / 1.5)
