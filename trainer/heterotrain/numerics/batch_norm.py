"""BatchNorm over the global batch: statistics cover the samples of all ranks, each counted once.

Each rank sends count, mean and variance of its samples for each channel. All ranks combine them in the same order in
fp64 (Chan, Golub and LeVeque 1979). So outputs, gradients and running statistics are those of one process with the
whole batch, for any division, and bitwise equal on all ranks. With counts ``n_i`` of rank i and their sum ``n``,

    mean = sum_i n_i/n mean_i        var = sum_i n_i/n (var_i + (mean_i - mean)^2)

The gradient also passes through the statistics. With ``d`` the gradient at the normalised values ``h``, and means over
the global batch (Ioffe and Szegedy 2015, section 3),

    dx = (d - mean(d) - h mean(d h)) / sqrt(var + eps)

Every rank has to reach the same layers in the same order. Therefore a rank without samples runs one sample that does
not count. A share that has to be cut into micro-batches is refused, because statistics would cover one micro-batch
only. ``local_batch_norm.py`` is the other choice: statistics of each micro-batch, without messages.

The statistics travel over the formation's control connections and neither reorder nor delay the gradient buckets.

Legend: N samples of this rank, C channels, W ranks, K numbers sent by each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from heterotrain_core.contract.choices import Choice
from torch import nn

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose

LEAST_VALUES = 2
"""Fewer values per channel have no variance; the same limit as torch's."""
_BatchNorm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001  # the only common base


class BatchNorm(Choice):
    """The samples over which BatchNorm layers take their statistics in training."""

    GLOBAL = "global"
    """All samples of the global batch, on all ranks."""
    LOCAL = "local"
    """Those of one micro-batch on one rank."""


@dataclass(slots=True)
class BatchNormContext:
    """The current step, as BatchNorm layers need it.

    Attributes:
        group: the formation's connections; ``None`` for a process without peers.
        counts: whether this rank's samples count; false for the one sample that a rank without a share runs.
        micro_batches: number of micro-batches in this rank's share.
        is_short: whether the step has fewer samples than the plan's global batch, as an epoch's last one may.
    """

    group: Group | None = None
    counts: bool = True
    micro_batches: int = 1
    is_short: bool = False

    def enter(self, group: Group | None, *, micro_batches: int, is_short: bool = False) -> None:
        """Begin a step with this number of micro-batches on this rank: 0 for a rank without samples."""
        self.group, self.counts, self.micro_batches = group, micro_batches > 0, micro_batches
        self.is_short = is_short

    @property
    def is_alone(self) -> bool:
        """Whether the global batch is this rank's own."""
        return self.counts and (self.group is None or self.group.world_size == 1)

    def leave(self) -> None:
        """End the step: outside of steps the statistics are those of the rank alone."""
        self.group, self.counts, self.micro_batches, self.is_short = None, True, 1, False

    def __deepcopy__(self, _memo: object) -> BatchNormContext:
        """Return the same object: a copy of a model takes part in the same steps."""
        return self

    def __reduce__(self) -> tuple[type[BatchNormContext], tuple[()]]:
        """Pickle an empty context: a model loaded from a file has no peers."""
        return BatchNormContext, ()

    def gather(self, values_K: torch.Tensor) -> torch.Tensor:  # noqa: N803  # shape in the name
        """Return every rank's values, by rank, as (W, K) float64 on the CPU; W is 1 for a process without peers.

        Args:
            values_K: this rank's (K,) values, of any dtype, on any device; K is the same on every rank.

        Raises:
            PeerLost: the group is broken.
        """
        row_K = values_K.detach().to("cpu", torch.float64).contiguous()  # noqa: N806  # shape in the name
        if self.group is None:
            return row_K.unsqueeze(0)
        gathering = self.group.gather(row_K.numpy().tobytes(), Purpose.BATCH_NORM)
        self.group.wait(gathering, "the statistics of a BatchNorm layer")
        return torch.frombuffer(bytearray(b"".join(gathering.rows)), dtype=torch.float64).view(-1, row_K.numel())


def synchronise(model: nn.Module, context: BatchNormContext) -> list[nn.Module]:
    """Turn every BatchNorm layer of the model into one over the global batch, and return these layers.

    The layers stay the same objects, with the same parameters, buffers and keys.

    Args:
        model: changed in place; layers converted before stay as they are.
        context: read by the layers in every forward pass.

    Raises:
        UsageError: a layer is another kind of BatchNorm, such as a lazy one or torch's own SyncBatchNorm.
    """
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if isinstance(module, GlobalBatchNorm):
            found.append(module)
            continue
        if type(module) not in GLOBAL:
            raise UsageError(
                f"layer {name!r} is a {type(module).__name__}, which cannot count over the global batch: leave out "
                "SyncBatchNorm.convert_sync_batchnorm, because job.wrap converts BatchNorm1d, BatchNorm2d and "
                "BatchNorm3d itself; or use GroupNorm or LayerNorm"
            )
        module.__class__ = GLOBAL[type(module)]  # type: ignore[assignment]  # a subclass of its class
        module.heterotrain_context, module.heterotrain_name = context, name  # type: ignore[assignment]  # not tensors
        found.append(module)
    return found


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Mean and variance of each channel over the samples of all ranks; bitwise equal on all ranks.

    Attributes:
        mean: (C,) float64, on the CPU.
        variance: (C,) float64, on the CPU, with divisor ``count`` (the biased variance, used for normalising).
        count: number of values per channel: samples times positions.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    count: float


class GlobalBatchNorm(_BatchNorm):
    """Mixin for BatchNorm layers: in training mode, statistics cover the global batch."""

    heterotrain_context: BatchNormContext
    heterotrain_name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the base class names it
        """Normalise (N, C, *) by channel; the result has the input's shape and dtype.

        Running statistics are updated as in torch, with the unbiased variance (divisor ``count - 1``). An epoch's last
        step may leave one value per channel, which has no variance: the running statistics normalise it and stay.

        Raises:
            PeerLost: the group is broken.
            UsageError: the share is cut into micro-batches, or a full step has only one value per channel.
        """
        if not self.training:
            return super().forward(input)
        if self.heterotrain_context.micro_batches > 1:
            raise UsageError(
                f"layer {self.heterotrain_name!r} is a BatchNorm over the global batch, but this rank's share is cut "
                "into micro-batches, so its statistics would be wrong. Use init(batch_norm='local'), a smaller global "
                "batch, more workers, GroupNorm or LayerNorm, or put the layer into eval mode."
            )
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        alone = self.heterotrain_context.is_alone
        statistics = None if alone else channel_statistics(input, self.heterotrain_context)
        count = input.numel() / input.shape[1] if statistics is None else statistics.count
        if count < LEAST_VALUES:
            if not self.heterotrain_context.is_short:
                raise UsageError(
                    f"layer {self.heterotrain_name!r} needs more than one value per channel, but a step has "
                    f"{count:g} over all ranks: use a larger global batch, GroupNorm or LayerNorm"
                )
            return by_running_statistics(self, input)
        if statistics is None:  # torch's own kernels, and no copy to the host, for which a GPU would be waited for
            return super().forward(input)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(statistics, self.running_mean, self.running_var)
        output: torch.Tensor = _Normalise.apply(input, statistics, self.eps, self.heterotrain_context)
        if self.weight is not None:
            output = output * self.weight.view(_by_channel(input)) + self.bias.view(_by_channel(input))
        return output.to(input.dtype)

    def _track(self, statistics: ChannelStatistics, running_mean: torch.Tensor, running_var: torch.Tensor) -> None:
        share = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / float(self.num_batches_tracked)
        unbiased = statistics.variance * (statistics.count / (statistics.count - 1.0))
        for running, value in ((running_mean, statistics.mean), (running_var, unbiased)):
            running.mul_(1 - share).add_(value.to(running), alpha=share)


class GlobalBatchNorm1d(GlobalBatchNorm, nn.BatchNorm1d):
    """Over (N, C) or (N, C, L)."""


class GlobalBatchNorm2d(GlobalBatchNorm, nn.BatchNorm2d):
    """Over (N, C, H, W)."""


class GlobalBatchNorm3d(GlobalBatchNorm, nn.BatchNorm3d):
    """Over (N, C, D, H, W)."""


GLOBAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
}


def by_running_statistics(layer: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Return (N, C, *) as the layer normalises it in eval mode; without running statistics, as zeros."""
    if layer.running_mean is None or layer.running_var is None:
        shape = _by_channel(x)
        normal = x * 0.0
        return normal if layer.weight is None else normal * layer.weight.view(shape) + layer.bias.view(shape)
    return nn.functional.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias, training=False, eps=layer.eps
    )


def channel_statistics(x: torch.Tensor, context: BatchNormContext) -> ChannelStatistics:
    """Return the statistics of (N, C, *) over the samples of all ranks; every rank has to call this at the same layer.

    Raises:
        PeerLost: the group is broken.
    """
    channels = x.shape[1]
    count = x.numel() / channels if context.counts else 0.0
    var_C, mean_C = torch.var_mean(_wide(x.detach()), dim=_others(x), correction=0)  # noqa: N806  # shapes in names
    rows_WK = context.gather(torch.cat([mean_C.new_tensor([count]), mean_C, var_C]))  # noqa: N806  # shapes in names
    rows_WK = rows_WK[rows_WK[:, 0] > 0]  # noqa: N806  # shapes in names
    total = float(rows_WK[:, 0].sum())
    weight_W1 = rows_WK[:, :1] / total  # noqa: N806  # shapes in names
    means_WC, vars_WC = rows_WK[:, 1 : 1 + channels], rows_WK[:, 1 + channels :]  # noqa: N806  # shapes in names
    mean_C = (weight_W1 * means_WC).sum(0)  # noqa: N806  # shapes in names
    return ChannelStatistics(
        mean=mean_C, variance=(weight_W1 * (vars_WC + (means_WC - mean_C) ** 2)).sum(0), count=total
    )


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps)``, with the gradient through mean and variance of the global batch."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, statistics: ChannelStatistics, eps: float, context: BatchNormContext
    ) -> torch.Tensor:
        wide, shape = _wide(x), _by_channel(x)
        inverse = (statistics.variance + eps).rsqrt().to(wide).view(shape)
        normal = (wide - statistics.mean.to(wide).view(shape)) * inverse
        ctx.save_for_backward(normal, inverse)
        ctx.count, ctx.context, ctx.counts, ctx.dtype = statistics.count, context, context.counts, x.dtype
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, inverse = ctx.saved_tensors
        d = gradients[0]
        here = torch.cat([d.sum(_others(d)), (d * normal).sum(_others(d))])
        if not ctx.counts:
            here = torch.zeros_like(here)
        mean_d, mean_dh = (ctx.context.gather(here).sum(0) / ctx.count).to(d).view(2, *_by_channel(d))
        through = inverse * (d - mean_d - normal * mean_dh) if ctx.counts else torch.zeros_like(d)
        return through.to(ctx.dtype), None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp32, or in fp64 if it has that dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _others(x: torch.Tensor) -> list[int]:
    """Return all dimensions except the channel dimension."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _by_channel(x: torch.Tensor) -> list[int]:
    """Return the shape in which a vector over channels broadcasts to the tensor."""
    return [1, -1, *([1] * (x.dim() - 2))]
