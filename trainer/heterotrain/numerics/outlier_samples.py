"""The noise scale where some samples' gradients are far larger than others.

A group of ``b_j`` samples deviates from the mean gradient by ``e_j``. For Gaussian gradients
``Var(b_j |e_j|^2) = 2 tr(Sigma^2)``, whatever its size. Outlier samples add ``K / b_j``, where ``K`` is the excess of
the fourth moment of one sample's gradient. So small groups are noisier than ``noise_scale.estimate`` assumes. With
``kappa = K / (2 tr(Sigma^2))``, in samples, ``estimate_by_rank`` gives small groups the weight that they deserve.
``Kurtosis`` learns ``kappa``: it compares how far estimates of small and of large groups are from the average.

All ranks need the same result to the last digit, because a learning rate may follow it. So everything is computed
with single operations on floats, which IEEE 754 defines, and ``math.fsum``, which rounds once. A library for linear
algebra would add in another order on another processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain.numerics.noise_scale import DECAY, NoiseSample, estimate

LEAST_STEPS = 50
"""Measured steps before outlier samples count in the weights."""
MOST_KURTOSIS_RATIO = 30.0
"""Limit of ``kappa`` as a multiple of the batch: the estimate is uncertain, and weights hardly change beyond."""
LEAST_SPREAD = 1e-6
"""Least difference between sizes of groups from which ``kappa`` is known, as a part of the regression's squares."""
MOST_DISTANCE = 1e4
"""Limit of one squared relative distance, which a single broken gradient must not exceed."""
LEAST_PART = 1e-6
"""Least difference of a group's part of the batch from 0 and from 1: formulas lose their digits beyond."""
LEAST_NOISE_RATIO = 1e-3
"""Lower limit of the noise scale as a multiple of the batch, because the weights no longer change below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSquares:
    """One rank's part of a step.

    Attributes:
        weighted: ``sum_j b_j |g_j|^2`` over its groups.
        groups: number of its groups, of nearly equal size.
        samples: of all its groups.
    """

    weighted: float
    groups: int
    samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Groups of one size, in units of the batch: ``number`` of them, each of ``part``."""

    number: int
    part: float


def estimate_by_rank(
    ranks: Sequence[RankSquares],
    *,
    total_squared: float,
    kurtosis_samples: float = 0.0,
    noise_samples: float | None = None,
) -> NoiseSample | None:
    """Return unbiased estimates of one step with weights for outlier samples; ``None`` where they do not exist.

    Among all estimates ``sum_j c_j (|g_j|^2 - |g|^2)`` without bias, it is the one of least variance, if the fourth
    moments are those of ``kurtosis_samples`` and the noise has no preferred direction. Other noise adds variance, but
    no bias. With ``kurtosis_samples`` 0 the result is that of ``noise_scale.estimate``.

    Args:
        ranks: those of the step.
        total_squared: ``|g|^2`` of the global gradient, weighted by true counts.
        kurtosis_samples: ``kappa``, at least 0.
        noise_samples: ``phi`` as known so far; ``None`` while unknown.
    """
    used = _with_groups(ranks)
    try:
        samples = math.fsum(rank.samples for rank in used)
        weighted = math.fsum(rank.weighted for rank in used)
        plain = estimate(
            weighted_squares=weighted, total_squared=total_squared, samples=samples, groups=sum(r.groups for r in used)
        )
        groups = _parts(used, samples)
        if plain is None or groups is None or kurtosis_samples <= 0:
            return plain
        weights = _weights(
            groups, kappa=min(kurtosis_samples / samples, MOST_KURTOSIS_RATIO), line=_line(noise_samples, samples)
        )
        variance = samples * math.fsum(
            weight * (rank.weighted * rank.groups / rank.samples - rank.groups * total_squared)
            for weight, rank in zip(weights, used, strict=True)
        )
    except (OverflowError, ValueError):  # sums beyond float64, and of infinities of both signs
        return None
    return NoiseSample(gradient_squared=total_squared - variance / samples, variance=variance)


def _with_groups(ranks: Sequence[RankSquares]) -> list[RankSquares]:
    return [rank for rank in ranks if rank.groups > 0 and rank.samples > 0]


def _parts(used: Sequence[RankSquares], samples: float) -> list[_Groups] | None:
    """Return the groups of each rank in units of the batch; ``None`` where some are too small or too large a part."""
    groups = [_Groups(number=rank.groups, part=rank.samples / rank.groups / samples) for rank in used]
    return groups if all(LEAST_PART <= each.part <= 1 - LEAST_PART for each in groups) else None


def _line(noise_samples: float | None, samples: float) -> float:
    """Return ``2 B / phi``, the variance of ``2 G'e`` of the whole batch per ``2 tr(Sigma^2)``; 0 if unknown."""
    return 0.0 if noise_samples is None else 2 / max(noise_samples / samples, LEAST_NOISE_RATIO)


def _weights(groups: Sequence[_Groups], *, kappa: float, line: float) -> list[float]:
    """Return the weight ``c`` of each group of least variance, with a batch of 1.

    With ``C = sum_j c_j``, the estimate deviates from its mean by the sum over groups of
    ``(c_j - C b_j^2) (|e_j|^2 - E|e_j|^2)`` and ``2 (c_j - C b_j) G'e_j``, and over pairs of ``-2 C b_j b_k e_j'e_k``.
    In units of ``2 tr(Sigma^2)`` the variances are ``f_j = 1 / b_j^2 + kappa / b_j^3`` for ``|e_j|^2``,
    ``h_j = line / b_j`` for ``2 G'e_j``, and together ``C^2 (1 - sum_j b_j^2)`` for the pairs. So the variance is
    ``c'Mc`` with ``M = D + 1 r' + r 1' + s 1 1'``, where ``D = diag(f + h)`` and ``r_j = -(f_j b_j^2 + h_j b_j)``. It
    is least, without bias, for ``c`` in proportion to ``M^-1 u`` with ``u_j = 1 / b_j - 1``. The rank-two part
    leaves a system of two equations (Woodbury), for ``one = sum_j c_j`` and ``cross = r'c``.

    Args:
        groups: those of each rank.
        kappa: excess of the fourth moment, as a part of the batch.
        line: as in ``_line``.
    """
    terms = []
    for each in groups:
        b = each.part
        f, h = (1 + kappa / b) / (b * b), line / b
        r = -(f * b * b + h * b)
        scale_part = each.number * (f * b * b * b * b + h * b * b - b * b)
        terms.append((each.number, f + h, r, 1 / b - 1, scale_part))
    scale = 1.0 + math.fsum(part for *_, part in terms)
    ones = math.fsum(n / d for n, d, _, _, _ in terms)
    mixed = math.fsum(n * r / d for n, d, r, _, _ in terms)
    squares = math.fsum(n * r * r / d for n, d, r, _, _ in terms)
    one_u = math.fsum(n * u / d for n, d, _, u, _ in terms)
    cross_u = math.fsum(n * r * u / d for n, d, r, u, _ in terms)
    # one (1 + scale ones + mixed) + cross ones = one_u and one (scale mixed + squares) + cross (1 + mixed) = cross_u
    first, second = 1 + scale * ones + mixed, scale * mixed + squares
    determinant = first * (1 + mixed) - ones * second
    one = (one_u * (1 + mixed) - ones * cross_u) / determinant
    cross = (first * cross_u - second * one_u) / determinant
    solved = [(u - cross - scale * one - one * r) / d for _, d, r, u, _ in terms]
    unit = math.fsum(n * u * c for (n, _, _, u, _), c in zip(terms, solved, strict=True))
    return [c / unit for c in solved]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kurtosis:
    """What is known of outlier samples: the sums of a regression.

    Each rank's own estimate of ``tr(Sigma)`` has a squared relative distance y from the average. Its mean is in
    proportion to ``A + kappa B``, with A and B known from sizes: so y is regressed on both.

    Attributes:
        gaussian_squared, product, outlier_squared: weighted sums of A^2, A B and B^2.
        gaussian_distance, outlier_distance: weighted sums of A y and B y.
        steps: measured steps, decayed.
    """

    gaussian_squared: float = 0.0
    product: float = 0.0
    outlier_squared: float = 0.0
    gaussian_distance: float = 0.0
    outlier_distance: float = 0.0
    steps: float = 0.0

    def after(
        self, ranks: Sequence[RankSquares], *, total_squared: float, variance: float, noise_samples: float | None = None
    ) -> Kurtosis:
        """Return the sums after one more step.

        Args:
            ranks: as in ``estimate_by_rank``.
            total_squared: as there.
            variance: the average of ``tr(Sigma)`` before this step.
            noise_samples: as there.
        """
        used = _with_groups(ranks)
        numbers = [total_squared, variance, *(rank.weighted for rank in used), *(rank.samples for rank in used)]
        if not used or not all(map(math.isfinite, numbers)) or variance <= 0:
            return self
        try:
            batch = math.fsum(rank.samples for rank in used)
        except OverflowError:
            return self
        parts = _parts(used, batch)
        if parts is None or batch < 1:
            return self
        kappa, line = min(self.samples() / batch, MOST_KURTOSIS_RATIO), _line(noise_samples, batch)
        rows = []
        for rank, groups in zip(used, parts, strict=True):
            own = (rank.weighted - rank.samples * total_squared) / (rank.groups * (1 - groups.part)) / variance - 1
            a, b = _variances(groups, line=line)
            weight = 1 / ((a + kappa * b) * (a + kappa * b))
            rows.append((weight, a, b / batch, min(own * own, MOST_DISTANCE)))
        every = math.fsum(w * a * a for w, a, _, _ in rows)
        rows = [(w / every, a, b, y) for w, a, b, y in rows]
        return Kurtosis(
            gaussian_squared=DECAY * self.gaussian_squared + math.fsum(w * a * a for w, a, _, _ in rows),
            product=DECAY * self.product + math.fsum(w * a * b for w, a, b, _ in rows),
            outlier_squared=DECAY * self.outlier_squared + math.fsum(w * b * b for w, _, b, _ in rows),
            gaussian_distance=DECAY * self.gaussian_distance + math.fsum(w * a * y for w, a, _, y in rows),
            outlier_distance=DECAY * self.outlier_distance + math.fsum(w * b * y for w, _, b, y in rows),
            steps=DECAY * self.steps + 1,
        )

    def samples(self) -> float:
        """Return ``kappa`` in samples: 0 before ``LEAST_STEPS``, for groups of one size and for Gaussian gradients.

        It is infinite where the distances show outlier samples only.
        """
        squares = self.gaussian_squared * self.outlier_squared
        spread = squares - self.product * self.product
        if self.steps < LEAST_STEPS or spread <= LEAST_SPREAD * squares:
            return 0.0
        outlier = self.gaussian_squared * self.outlier_distance - self.product * self.gaussian_distance
        gaussian = self.outlier_squared * self.gaussian_distance - self.product * self.outlier_distance
        if outlier <= 0:
            return 0.0
        return outlier / gaussian if gaussian > 0 else math.inf


def _variances(groups: _Groups, *, line: float) -> tuple[float, float]:
    """Return A and B of one rank's own estimate: its variance as in ``_weights``, without and per ``kappa``."""
    n, b = groups.number, groups.part
    weight = 1 / (n * (1 / b - 1))
    every = n * weight
    own = n * (weight - every * b * b) * (weight - every * b * b)
    others = every * every
    gaussian = own / (b * b) + others * (1 - n * b * b)
    lines = n * (weight - every * b) * (weight - every * b) / b + others * (1 - n * b)
    return gaussian + line * lines, own / (b * b * b) + others * (1 - n * b)
