"""Clipping of a step's gradient, as the script has left it."""

from __future__ import annotations

import math
from typing import TypeAlias

from heterotrain.exchange.interface import Gradients
from heterotrain.steps.result import GradientNorm

ClipLimits: TypeAlias = tuple[float | None, float | None]
"""Upper limits for a gradient's norm, and then for the magnitude of its elements; ``None`` for no limit."""


def clip(reducer: Gradients, squared: float | None, limits: ClipLimits) -> GradientNorm:
    """Clip the gradient and return its earlier norm; without limits, from ``squared`` where that was measured."""
    clip_norm, clip_value = limits
    reducer.check_kept()
    if clip_norm is not None or clip_value is not None:
        reducer.take_back()
        squared = float(reducer.squared_norm())
    elif squared is None:
        squared = reducer.known_squared
    norm = None if squared is None else math.sqrt(squared)
    if norm is not None and clip_norm is not None and norm > clip_norm:
        reducer.scale(clip_norm / norm)
    if clip_value is not None:
        reducer.clamp(clip_value)
    return GradientNorm(reducer, norm=norm)
