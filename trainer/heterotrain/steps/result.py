"""The result of a step, as ``step.apply`` returns it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from heterotrain.errors import UsageError
from heterotrain.exchange.flat.buckets import squared_norm
from heterotrain.exchange.gate import Gate
from heterotrain.exchange.interface import Gradients

_VERSION = attrgetter("_version")
"""Torch's own count of a tensor's changes."""


class GradientNorm:
    """The norm of a step's gradient before clipping; computed when first read, because it costs a pass over it."""

    def __init__(self, reducer: Gradients, *, norm: float | None = None, gate: Gate | None = None) -> None:
        """Keep the norm or its gate, else the buckets, which hold the gradient until the next step overwrites it."""
        self._norm, self._gate, self._reducer = norm, gate, reducer
        self._flats = [] if norm is not None or gate is not None else reducer.flats
        self._versions = list(map(_VERSION, self._flats))

    def value(self) -> float:
        """Return the norm.

        Raises:
            UsageError: the gradient has been overwritten.
        """
        if self._gate is not None:
            self._norm, self._gate = math.sqrt(self._gate.read().squared), None
        if self._norm is None:
            if list(map(_VERSION, self._flats)) != self._versions:
                raise UsageError(
                    "the gradient of this step has been overwritten, so its norm is not known any more: read "
                    "result.gradient_norm right after step.apply, before the next step begins"
                )
            flats, self._flats = self._flats, []
            is_current = flats is self._reducer.flats  # else the next step has other buckets
            self._norm = math.sqrt(float(self._reducer.squared_norm() if is_current else squared_norm(flats)))
        return self._norm


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did, over all ranks; the same on every rank.

    On accelerators of different kinds, ``gradient_norm`` may differ in its last digits.

    Attributes:
        loss: mean over the global batch, each micro-batch with its samples (or the ``weight`` of ``step.backward``);
            NaN if there was no weight at all.
        learning_rates: the rate that each parameter group of each optimizer used, in the order of ``step.apply``; the
            learning-rate rule's factor is included.
        samples: samples of the step over all ranks.
        weight: total weight of the step: its samples, or the sum of the weights of ``step.backward``.
    """

    loss: float
    learning_rates: tuple[float, ...]
    samples: int
    weight: float
    _skip_reason: str | Callable[[], str] = ""
    _norm: GradientNorm = field(repr=False, compare=False)

    @property
    def skip_reason(self) -> str:
        """Why the weights stayed as they were; empty if they did not. A step that waits is confirmed now."""
        return self._skip_reason if isinstance(self._skip_reason, str) else self._skip_reason()

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group of the first optimizer."""
        return self.learning_rates[0]

    @property
    def skipped(self) -> bool:
        """Whether the weights stayed as they were, although the step is committed."""
        return bool(self.skip_reason)

    @property
    def gradient_norm(self) -> float:
        """Norm of the global batch's gradient over all parameters, before clipping; read it before the next step.

        The first access costs a pass over the gradients, unless ``clip_norm`` has computed the norm already.

        Raises:
            UsageError: the gradient has been overwritten since.
        """
        return self._norm.value()
