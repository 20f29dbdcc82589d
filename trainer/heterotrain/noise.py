"""Gradient noise scale from uneven shares, minimum-variance unbiased.

With n ranks of batches b_i that sum to B, local mean gradients g_i and the step's gradient g::

    tr(Sigma) = (sum_i b_i |g_i|^2 - B |g|^2) / (n - 1)        |G|^2 = |g|^2 - tr(Sigma) / B

The ratio of their running means estimates the noise scale tr(Sigma) / |G|^2 in samples (S. McCandlish et al., "An
Empirical Model of Large-Batch Training", 2018, appendix A.1, extended to uneven batches).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseAverages:
    """Exponential running means; the weight makes up for the first steps' bias."""

    squared: float = 0.0
    variance: float = 0.0
    weight: float = 0.0
    decay: float = 0.95

    @property
    def gradient_squared(self) -> float | None:
        """Estimate of |G|^2, ``None`` while nothing was seen."""
        return self.squared / self.weight if self.weight else None

    @property
    def gradient_variance(self) -> float | None:
        """Estimate of tr(Sigma) per sample, ``None`` while nothing was seen."""
        return self.variance / self.weight if self.weight else None

    @property
    def noise_scale_samples(self) -> float | None:
        """Estimate of tr(Sigma) / |G|^2 in samples; ``None`` while it is not positive and finite."""
        squared, variance = self.gradient_squared, self.gradient_variance
        if squared is None or variance is None or squared <= 0 or variance <= 0:
            return None
        return variance / squared


def observe(
    averages: NoiseAverages, *, small_squared: float, big_squared: float, batch_samples: int, ranks: int
) -> NoiseAverages:
    """Return the averages after one more step.

    Args:
        averages: those before it.
        small_squared: sum over ranks of b_i |g_i|^2.
        big_squared: |g|^2.
        batch_samples: B.
        ranks: n, ranks with samples; fewer than two tell nothing.
    """
    if ranks < 2:  # noqa: PLR2004 - the formula divides by n - 1
        return averages
    variance = (small_squared - batch_samples * big_squared) / (ranks - 1)
    squared = big_squared - variance / batch_samples
    keep, add = averages.decay, 1.0 - averages.decay
    return replace(
        averages,
        squared=keep * averages.squared + add * squared,
        variance=keep * averages.variance + add * variance,
        weight=keep * averages.weight + add,
    )
