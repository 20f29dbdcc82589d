"""Measures a rank's gradients for the noise scale; the mathematics is in ``heterotrain.numerics.noise_scale``.

A group is one micro-batch. Its mean gradient ``g_j`` is measured before anything is summed over ranks or compressed.
On a rank with one micro-batch, the buckets hold it; with several, each gradient is measured on its way into the
buckets. The squares still contain the factors on the loss, which are divided out at the end.

Preconditioned squares are those of an adaptive optimizer's step: each element of the gradient is divided by
``sqrt(v_hat) + eps`` (for AdaScale's Adam form).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heterotrain.exchange.flat.buckets import WholeBucket, squared_norm
from heterotrain.exchange.interface import Gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Squared norms of one rank's gradients, from which the noise scale is estimated (``heterotrain_core``).

    Attributes:
        weighted: ``sum_j b_j |g_j|^2`` over groups, b_j in samples; NaN when unknown.
        groups: number of groups.
        total: ``|g|^2`` of the whole batch; NaN when unknown.
    """

    weighted: float = math.nan
    groups: int = 0
    total: float = math.nan


class Measurement:
    """The squares of one attempt at one step.

    Attributes:
        spent_s: seconds of this thread that the measurement has taken.
    """

    def __init__(
        self, reducer: Gradients, *, micro_batches: int, loss_scale: float, preconditioner: Preconditioner | None
    ) -> None:
        """Begin to measure gradients.

        Args:
            reducer: the buckets that receive them.
            micro_batches: number of this rank's micro-batches.
            loss_scale: factor on the loss in addition to its weight.
            preconditioner: for the preconditioned squares; ``None`` measures plain ones only.
        """
        self.spent_s = 0.0
        self._reducer = reducer
        self._loss_scale = loss_scale
        self._preconditioner = preconditioner
        self._now: list[list[torch.Tensor | float]] = [[], []]
        self._weighted: list[torch.Tensor | float] = [0.0, 0.0]
        self._totals: list[torch.Tensor | float] = [math.nan, math.nan]
        self._groups = 0
        if micro_batches > 1:
            reducer.watch(self._gradient)
        else:
            reducer.watch_buckets(self._bucket)

    def group_done(self, weight: float) -> None:
        """Record the end of a micro-batch with ``weight`` samples (or tokens); with weight 0 it is not a group."""
        if weight > 0:
            self._groups += 1
            for kind, parts in enumerate(self._now):
                if parts:
                    self._weighted[kind] = self._weighted[kind] + sum(parts) / weight
        self._now = [[], []]

    def reduced(self, squared: torch.Tensor | None = None) -> torch.Tensor | float:
        """Measure the step's gradient, summed over all ranks and without factors; return its squared norm.

        Nothing is read from an accelerator here.

        Args:
            squared: this norm, where it is being computed already.
        """
        began_s = time.perf_counter()
        self._totals[0] = self._reducer.squared_norm() if squared is None else squared
        if self._preconditioner is not None:
            self._totals[1] = sum(sum(self._preconditioned(bucket)) for bucket in self._reducer.buckets)
        self.spent_s += time.perf_counter() - began_s
        return self._totals[0]

    def squares(self, *, batch_samples: int, weight: float) -> tuple[Squares, Squares]:
        """Return this rank's plain and preconditioned squares; NaN where they were not measured.

        The measured gradient of micro-batch j is ``loss_scale * w_j / B * g_j``. In samples, ``b_j = w_j B / W``, so
        ``b_j |g_j|^2`` is its square, divided by ``w_j``, times ``B^3 / (W loss_scale^2)``.

        Args:
            batch_samples: B, samples of the step over all ranks.
            weight: W, their weight (samples or tokens).
        """
        factor = batch_samples**3 / (weight * self._loss_scale**2) if weight > 0 else math.nan
        plain, preconditioned = (
            Squares(weighted=float(weighted) * factor, groups=self._groups, total=float(total))
            for weighted, total in zip(self._weighted, self._totals, strict=True)
        )
        return plain, (preconditioned if self._preconditioner is not None else Squares())

    def _bucket(self, bucket: WholeBucket) -> None:
        began_s = time.perf_counter()
        self._now[0].append(squared_norm([bucket.flat]))
        self._now[1] += self._preconditioned(bucket)
        self.spent_s += time.perf_counter() - began_s

    def _gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        began_s = time.perf_counter()
        self._now[0].append(squared_norm([gradient]))
        if self._preconditioner is not None:
            self._now[1].append(self._preconditioner.square(parameter, gradient))
        self.spent_s += time.perf_counter() - began_s

    def _preconditioned(self, bucket: WholeBucket) -> list[torch.Tensor | float]:
        if self._preconditioner is None:
            return []
        pairs = zip(bucket.parameters, bucket.views, strict=True)
        return [self._preconditioner.square(parameter, view) for parameter, view in pairs]


class Preconditioner:
    """Divides gradients as the optimizers do, using their state before the step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._of = {
            id(parameter): (optimizer.state.get(parameter, {}), group)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }

    @property
    def is_known(self) -> bool:
        """Whether every parameter has a second moment: only after an optimizer's first step."""
        return all("exp_avg_sq" in state for state, _group in self._of.values())

    def square(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | float:
        """Return ``sum (g / (sqrt(v_hat) + eps))^2`` in float64; 0 for a parameter without an optimizer.

        v_hat is Adam's bias-corrected second moment (Kingma and Ba 2015), or its maximum with ``amsgrad``.
        """
        if id(parameter) not in self._of:
            return 0.0
        state, group = self._of[id(parameter)]
        moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        correction = 1 - group["betas"][1] ** float(state["step"])
        return squared_norm([gradient / ((moment / correction).sqrt() + group["eps"])])
