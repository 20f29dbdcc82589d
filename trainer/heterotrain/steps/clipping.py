"""Clipping of a step's gradient, as the script has left it."""

from __future__ import annotations

import math
from typing import TypeAlias

from heterotrain.exchange.interface import Gradients
from heterotrain.steps.result import GradientNorm

ClipLimits: TypeAlias = tuple[float | None, float | None]
"""Upper limits for a gradient's norm, and then for the magnitude of its elements; ``None`` for no limit."""


def clip(reducer: Gradients, squared: float | None, limits: ClipLimits) -> GradientNorm:
    """Clip the gradient and return its earlier norm; ``squared`` is the square of it, if it was measured."""
    clip_norm, clip_value = limits
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
