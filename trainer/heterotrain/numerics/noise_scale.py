"""The gradient noise scale from unequal shares: up to which batch larger batches pay off.

Per-sample gradients have mean ``G`` and covariance ``Sigma``. A group of ``b_j`` samples (a rank's share, or one of its
micro-batches) has the mean gradient ``g_j`` with ``E|g_j|^2 = |G|^2 + tr(Sigma)/b_j``; the global batch of ``B`` has
``g`` with ``E|g|^2 = |G|^2 + tr(Sigma)/B``. With ``n`` groups

    tr(Sigma) ~ (sum_j b_j |g_j|^2 - B |g|^2) / (n - 1)          |G|^2 ~ |g|^2 - tr(Sigma)/B

For independent Gaussian gradients ``g`` and the sum of squares between groups are complete and sufficient, so these are
the unbiased estimators of least variance, for any shares and micro-batches. Other gradients are in ``outlier_samples``.
The noise scale is ``phi = tr(Sigma) / |G|^2`` in samples (McCandlish et al. 2018, arXiv 1812.06162, the "simple" one).
Both parts are averaged first and divided last, since the ratio of noisy numbers is biased.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAY = 0.999
"""Decay of the averages for one step of the base batch; a larger batch counts as that many base batches."""
MOST_BATCHES = 1e4
"""Limit of the noise scale, as a multiple of the batch it was measured with: beyond, ``|G|^2`` is lost in noise."""
LEAST_BATCHES = 10
"""Base batches that averages have to hold before a noise scale follows: the ratio of a few steps is arbitrary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSample:
    """Unbiased estimates from one step; either may be negative by chance.

    Attributes:
        gradient_squared: of ``|G|^2``.
        variance: of ``tr(Sigma)``, per sample.
    """

    gradient_squared: float
    variance: float


def estimate(*, weighted_squares: float, total_squared: float, samples: float, groups: int) -> NoiseSample | None:
    """Return the least-variance unbiased estimates of one step; ``None`` where they do not exist.

    Args:
        weighted_squares: ``sum_j b_j |g_j|^2`` over all groups of all ranks.
        total_squared: ``|g|^2`` of the global gradient, weighted by true counts.
        samples: ``B``, true samples (or tokens) of the step.
        groups: non-empty micro-batches of all ranks, at least 2.
    """
    if groups < 2 or samples <= 0:  # noqa: PLR2004  # one group has no spread
        return None
    if not (math.isfinite(weighted_squares) and math.isfinite(total_squared)):
        return None
    variance = (weighted_squares - samples * total_squared) / (groups - 1)
    return NoiseSample(gradient_squared=total_squared - variance / samples, variance=variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseAverage:
    """Bias-corrected exponential averages of both parts.

    Attributes:
        gradient_squared, variance: weighted sums that start from zero.
        weight: how much of a full average they hold, in [0, 1).
        samples: batch of the last step.
    """

    gradient_squared: float = 0.0
    variance: float = 0.0
    weight: float = 0.0
    samples: float = 0.0

    def after(self, sample: NoiseSample, *, samples: float, base_samples: float) -> NoiseAverage:
        """Return the averages after one more step of ``samples``; decay is per base batch."""
        if not (math.isfinite(sample.gradient_squared) and math.isfinite(sample.variance)):
            return self
        keep = DECAY ** max(samples / base_samples, 1e-6)
        return NoiseAverage(
            gradient_squared=keep * self.gradient_squared + (1 - keep) * sample.gradient_squared,
            variance=keep * self.variance + (1 - keep) * sample.variance,
            weight=keep * self.weight + (1 - keep),
            samples=samples,
        )

    def corrected(self) -> NoiseSample | None:
        """Return the unbiased averages, ``None`` before the first step."""
        if self.weight <= 0:
            return None
        return NoiseSample(gradient_squared=self.gradient_squared / self.weight, variance=self.variance / self.weight)

    def scale(self) -> float | None:
        """Return phi in samples, ``None`` before the averages hold ``LEAST_BATCHES`` base batches."""
        if self.weight < (1 - DECAY**LEAST_BATCHES) * (1 - 1e-9):
            return None
        return noise_scale(self.corrected(), samples=self.samples)


def noise_scale(average: NoiseSample | None, *, samples: float) -> float | None:
    """Return phi in samples from averaged parts, between 0 and ``MOST_BATCHES * samples``; ``None`` while unknown.

    An estimate of ``|G|^2`` at or below zero means that noise hides it, so phi is at its limit. A variance at or below
    zero means that no noise was observed, so phi is 0.

    Args:
        average: averaged estimates.
        samples: the batch they were measured with.
    """
    if average is None or samples <= 0 or not math.isfinite(average.variance + average.gradient_squared):
        return None
    limit = MOST_BATCHES * samples
    if average.variance <= 0:
        return 0.0 if average.gradient_squared > 0 else None
    if average.gradient_squared <= average.variance / limit:
        return limit
    return average.variance / average.gradient_squared
