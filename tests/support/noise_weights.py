"""Other estimators of the gradient noise scale, for comparison with the product's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def local_estimates(shares: Sequence[float], squares: Sequence[float], total_squared: float) -> tuple[Floats, Floats]:
    """Return each group's own unbiased estimates of ``|G|^2`` and ``tr(Sigma)``, from itself against the whole batch.

    ``G_i = (B|g|^2 - b_i|g_i|^2)/(B - b_i)`` and ``S_i = b_i B/(B - b_i) (|g_i|^2 - |g|^2)``. Any weights that sum to
    one combine them without bias; the weights below differ in variance only.
    """
    b, square = np.array(shares, dtype=float), np.array(squares, dtype=float)
    total = b.sum()
    return (
        (total * total_squared - b * square) / (total - b),
        b * total / (total - b) * (square - total_squared),
    )


def least_variance_weights(shares: Sequence[float]) -> Floats:
    """Return the weights ``(B - b_i) / ((n - 1) B)``; with them, local estimates give ``noise_scale.estimate``."""
    b: Floats = np.array(shares, dtype=float)
    weights: Floats = (b.sum() - b) / ((len(b) - 1) * b.sum())
    return weights


def uniform_weights(shares: Sequence[float]) -> Floats:
    """Return equal weights."""
    return np.full(len(shares), 1.0 / len(shares))


def published_weights(shares: Sequence[float]) -> tuple[Floats, Floats]:
    """Return Cannikin's weights for ``|G|^2`` and ``tr(Sigma)``: ``A^-1 1 / (1' A^-1 1)``.

    The matrices are those of the authors' code (github chengyinie/hetero_adaptdl). They drop the cross terms of
    ``Cov(|g|^2, |g_i|^2)``, so the result is unbiased but not of least variance, and weights can be negative.
    """
    b = np.array(shares, dtype=float)
    total = b.sum()
    rest = total - b
    of_gradient = (total**2 - b[:, None] ** 2 - b[None, :] ** 2) / (total * rest[:, None] * rest[None, :])
    np.fill_diagonal(of_gradient, (total + 2 * b) / (total**2 - total * b))
    of_variance = b[:, None] * b[None, :] * (total - b[:, None] - b[None, :]) / (rest[:, None] * rest[None, :])
    np.fill_diagonal(of_variance, total * b / rest)
    ones = np.ones(len(b))
    solved = [np.linalg.lstsq(matrix, ones, rcond=None)[0] for matrix in (of_gradient, of_variance)]
    return solved[0] / solved[0].sum(), solved[1] / solved[1].sum()
