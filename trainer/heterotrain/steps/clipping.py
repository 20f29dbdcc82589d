"""Clipping of a step's gradient, as the script has left it."""

from __future__ import annotations

import math

from heterotrain.numerics.gradients import Gradients
from heterotrain.steps.result import GradientNorm


def clip(
    reducer: Gradients, squared: float | None, *, clip_norm: float | None, clip_value: float | None
) -> GradientNorm:
    """Clip the gradient and return its earlier norm.

    Args:
        reducer: holds the gradient.
        squared: square of its norm, if it was measured.
        clip_norm: upper limit for the norm; ``None`` for no limit.
        clip_value: upper limit for the magnitude of its elements, applied after ``clip_norm``; ``None`` for no limit.
    """
    reducer.check_kept()
    clips = clip_norm is not None or clip_value is not None
    squared = None if clips and reducer.take_back() else squared
    if squared is None:
        squared = float(reducer.squared_norm()) if clips else reducer.known_squared
    norm = None if squared is None else math.sqrt(squared)
    if norm is not None and clip_norm is not None and norm > clip_norm:
        reducer.scale(clip_norm / norm)
    if clip_value is not None:
        reducer.clamp(clip_value)
    return GradientNorm(reducer, norm=norm)
