"""What a rank measures for the gradient's noise scale; the mathematics is core's (``heterotrain_core.noise_scale``).

A group is one micro-batch. Its mean gradient ``g_j`` is seen before anything is added up over ranks or rounded for the
wire: where a rank has one micro-batch, its buckets hold it; where it has several, each gradient is looked at on its way
into the buckets. The squares are measured with the factors that the loss was given, and freed from them at the end.

Preconditioned squares are those of the step that an adaptive optimizer takes: each element of the gradient divided by
``sqrt(v_hat) + eps`` (AdaScale's Adam form needs them).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from heterotrain.network.control import Squares
from heterotrain.numerics.buckets import Bucket, squared_norm
from heterotrain.numerics.reducer import Reducer


class Measurement:
    """The squares of one attempt at one step.

    Attributes:
        spent_s: seconds of this thread that measuring has taken.
    """

    def __init__(
        self, reducer: Reducer, *, micro_batches: int, loss_scale: float, preconditioner: Preconditioner | None
    ) -> None:
        """Begin to look at gradients.

        Args:
            reducer: where they arrive.
            micro_batches: how many this rank has.
            loss_scale: factor on the loss beside its weight.
            preconditioner: for the preconditioned squares; without it only plain ones are measured.
        """
        self.spent_s = 0.0
        self._reducer = reducer
        self._loss_scale = loss_scale
        self._preconditioner = preconditioner
        self._now: list[list[torch.Tensor | float]] = [[], []]
        self._weighted: list[torch.Tensor | float] = [0.0, 0.0]
        self._totals = [math.nan, math.nan]
        self._groups = 0
        if micro_batches > 1:
            reducer.watch(self._gradient)
        else:
            reducer.on_launch = self._bucket

    def group_done(self, weight: float) -> None:
        """Note that one micro-batch of ``weight`` samples (or tokens) is through; without weight it is no group."""
        if weight > 0:
            self._groups += 1
            for kind, parts in enumerate(self._now):
                if parts:
                    self._weighted[kind] = self._weighted[kind] + sum(parts) / weight
        self._now = [[], []]

    def reduced(self) -> float:
        """Look at the step's gradient, over all ranks and free of factors; return its squared norm."""
        began_s = time.perf_counter()
        self._totals[0] = float(squared_norm(self._reducer.flats))
        if self._preconditioner is not None:
            self._totals[1] = sum(float(sum(self._preconditioned(bucket))) for bucket in self._reducer.buckets)
        self.spent_s += time.perf_counter() - began_s
        return self._totals[0]

    def squares(self, *, batch_samples: int, weight: float) -> tuple[Squares, Squares]:
        """Return this rank's plain and preconditioned squares; unknown where they were not measured.

        The gradient of micro-batch j came as ``loss_scale * w_j / B * g_j``. In samples, ``b_j = w_j B / W``, so
        ``b_j |g_j|^2`` is what was seen, divided by ``w_j``, times ``B^3 / (W loss_scale^2)``.

        Args:
            batch_samples: B, samples of the step over all ranks.
            weight: W, their weight (samples or tokens).
        """
        factor = batch_samples**3 / (weight * self._loss_scale**2) if weight > 0 else math.nan
        plain, preconditioned = (
            Squares(weighted=float(weighted) * factor, groups=self._groups, total=total)
            for weighted, total in zip(self._weighted, self._totals, strict=True)
        )
        return plain, (preconditioned if self._preconditioner is not None else Squares())

    def _bucket(self, bucket: Bucket) -> None:
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

    def _preconditioned(self, bucket: Bucket) -> list[torch.Tensor | float]:
        if self._preconditioner is None:
            return []
        pairs = zip(bucket.parameters, bucket.views, strict=True)
        return [self._preconditioner.square(parameter, view) for parameter, view in pairs]


class Preconditioner:
    """Divides gradients as the optimizers do, from their state before the step."""

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
        """Whether every parameter has a second moment already: not before an optimizer's first step."""
        return all("exp_avg_sq" in state for state, _group in self._of.values())

    def square(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | float:
        """Return ``sum (g / (sqrt(v_hat) + eps))^2`` in float64, 0 for what no optimizer moves.

        v_hat is Adam's bias-corrected second moment (Kingma and Ba 2015), or its maximum with ``amsgrad``.
        """
        if id(parameter) not in self._of:
            return 0.0
        state, group = self._of[id(parameter)]
        moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        correction = 1 - group["betas"][1] ** float(state["step"])
        return squared_norm([gradient / ((moment / correction).sqrt() + group["eps"])])
