"""The noise scale with the weights that Cannikin publishes (Nie et al. 2024, arXiv 2402.05302), for comparison.

Each group of ``b_i`` samples estimates both parts from itself against the whole batch of ``B``:

    |G|^2 ~ (B |g|^2 - b_i |g_i|^2) / (B - b_i)          tr(Sigma) ~ b_i B / (B - b_i) (|g_i|^2 - |g|^2)

Their weights are ``A^-1 1 / (1' A^-1 1)``, where ``A`` is the published covariance matrix of these estimates. It lacks
``2 b_i b_k g_i' g_k``, so the result has no bias, but more variance than ``noise_scale.estimate``
(docs/mathematics.md). Divided by ``(B - b_i) (B - b_k)`` or ``b_i b_k / ((B - b_i) (B - b_k))``, both matrices are a
diagonal and a part of rank two, so the weights follow from two linear equations in time linear in the ranks.

As in ``outlier_samples``, only single operations on floats and ``math.fsum`` are used, so that all ranks get the same
last digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract.choices import Choice

from heterotrain.numerics.noise_scale import NoiseSample
from heterotrain.numerics.outlier_samples import LEAST_PART, RankSquares


class NoiseWeights(Choice):
    """How the squares of unequal groups are combined to a noise scale."""

    LEAST_VARIANCE = "least-variance"
    """The unbiased estimates of least variance, with weights for outlier samples once these are known."""
    PUBLISHED = "published"
    """Cannikin's weights, for comparison with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """A rank's groups in units of the batch: ``number`` of them, each of ``part``; ``rest`` is the batch without one.

    ``square`` is the mean of their ``|g_i|^2``.
    """

    number: int
    part: float
    rest: float
    square: float


def estimate_as_published(ranks: Sequence[RankSquares], *, total_squared: float) -> NoiseSample | None:
    """Return the estimates of one step with the published weights; ``None`` where they do not exist.

    Args:
        ranks: those of the step; groups of one rank have nearly equal size and get equal weights.
        total_squared: ``|g|^2`` of the global gradient, weighted by true counts.
    """
    used = [rank for rank in ranks if rank.groups > 0 and rank.samples > 0]
    try:
        samples = math.fsum(rank.samples for rank in used)
        groups = [_groups(rank, samples) for rank in used]
        if sum(each.number for each in groups) < 2 or not math.isfinite(total_squared):  # noqa: PLR2004  # no spread
            return None
        if not all(LEAST_PART <= each.part <= 1 - LEAST_PART and math.isfinite(each.square) for each in groups):
            return None
        gradient = math.fsum(
            weight * each.number * (total_squared - each.part * each.square) / each.rest
            for weight, each in zip(_weights_of_gradient(groups), groups, strict=True)
        )
        variance = samples * math.fsum(
            weight * each.number * each.part * (each.square - total_squared) / each.rest
            for weight, each in zip(_weights_of_variance(groups), groups, strict=True)
        )
    except (ArithmeticError, ValueError):  # beyond float64, or a matrix without an inverse
        return None
    return NoiseSample(gradient_squared=gradient, variance=variance)


def _groups(rank: RankSquares, samples: float) -> _Groups:
    part = rank.samples / rank.groups / samples
    return _Groups(number=rank.groups, part=part, rest=1 - part, square=rank.weighted / rank.samples)


def _weights_of_gradient(groups: Sequence[_Groups]) -> list[float]:
    """Return the weight of each group for ``|G|^2``, with a batch of 1.

    ``A_ik = (1 - b_i^2 - b_k^2) / (r_i r_k)`` and ``A_ii = (1 + 2 b_i) / r_i``, where ``r_i = 1 - b_i``. So
    ``r_i r_k A_ik`` is ``diag(b) + 1 1' - b^2 1' - 1 b^2'``.
    """
    whole = math.fsum(g.number * g.part * g.rest for g in groups)
    whole /= 1 - math.fsum(g.number * g.part * g.part * g.part for g in groups)
    inverse = math.fsum(g.number / g.part for g in groups)
    shift = whole - math.fsum(g.number * g.rest / g.part for g in groups) / inverse
    return _normalised(groups, [g.rest * (g.rest + shift - whole * (1 - g.part * g.part)) / g.part for g in groups])


def _weights_of_variance(groups: Sequence[_Groups]) -> list[float]:
    """Return the weight of each group for ``tr(Sigma)``, with a batch of 1.

    ``A_ik = b_i b_k (1 - b_i - b_k) / (r_i r_k)`` and ``A_ii = b_i / r_i``. So ``A_ik r_i r_k / (b_i b_k)`` is
    ``diag(1 / b - 2 + 2 b) + 1 1' - b 1' - 1 b'``.
    """
    bend = [1 / g.part - 2 + 2 * g.part for g in groups]
    pairs = list(zip(groups, bend, strict=True))
    rests = math.fsum(g.number * g.rest / d for g, d in pairs)
    ones = math.fsum(g.number / d for g, d in pairs)
    parts = math.fsum(g.number * g.part / d for g, d in pairs)
    mixed = math.fsum(g.number * g.part * g.rest / d for g, d in pairs)
    target = math.fsum(g.number * g.rest / (g.part * d) for g, d in pairs)
    # whole (1 + rests) - cross ones = target and whole mixed + cross (1 - parts) = rests
    determinant = (1 + rests) * (1 - parts) + ones * mixed
    whole = (target * (1 - parts) + ones * rests) / determinant
    cross = ((1 + rests) * rests - mixed * target) / determinant
    return _normalised(groups, [(g.rest / g.part - g.rest * whole + cross) / d * g.rest / g.part for g, d in pairs])


def _normalised(groups: Sequence[_Groups], weights: Sequence[float]) -> list[float]:
    total = math.fsum(each.number * weight for each, weight in zip(groups, weights, strict=True))
    return [weight / total for weight in weights]
