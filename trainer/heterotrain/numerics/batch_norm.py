"""BatchNorm over the global batch: statistics cover the samples of all ranks, each counted once.

Each rank gives count, mean and variance of its samples for each channel. All ranks combine them in the same order in
fp64 (Chan, Golub and LeVeque 1979). So outputs, gradients and running statistics are those of one process with the
whole batch, for any division, and bitwise equal on all ranks. With counts ``n_i`` of rank i and their sum ``n``,

    mean = sum_i n_i/n mean_i        var = sum_i n_i/n (var_i + (mean_i - mean)^2)

The gradient also passes through the statistics. With ``d`` the gradient at the normalised values ``h``, and means over
the global batch (Ioffe and Szegedy 2015, section 3),

    dx = (d - mean(d) - h mean(d h)) / sqrt(var + eps)

Every rank has to reach the same layers in the same order. Therefore a rank without samples runs one sample that does
not count. A share that has to be cut into micro-batches is refused, because statistics would cover one micro-batch
only. ``local_batch_norm.py`` is the other choice: statistics of each micro-batch, without messages.

The statistics travel over the formation's control connections, and neither reorder nor delay the gradient buckets.
Where NCCL connects all ranks, they are sums on the device instead, and the host does not wait (docs/adr/0068). Each
rank then adds a table that is zero but for its own row, so sums are exact.

Legend: N samples of this rank, C channels, W ranks, V values per channel, K numbers of each rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

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
        on_device: whether statistics are sums of the formation, and the host does not know them; the same on all ranks.
    """

    group: Group | None = None
    counts: bool = True
    micro_batches: int = 1
    is_short: bool = False
    on_device: bool = False

    def enter(self, group: Group | None, *, micro_batches: int, is_short: bool = False) -> None:
        """Begin a step with this number of micro-batches on this rank: 0 for a rank without samples."""
        self.group, self.counts, self.micro_batches = group, micro_batches > 0, micro_batches
        self.is_short, self.on_device = is_short, False

    @property
    def is_alone(self) -> bool:
        """Whether the global batch is this rank's own."""
        return self.counts and (self.group is None or self.group.world_size == 1)

    def leave(self) -> None:
        """End the step: outside of steps the statistics are those of the rank alone."""
        self.enter(None, micro_batches=1)

    def __deepcopy__(self, _memo: object) -> BatchNormContext:
        """Return the same object: a copy of a model takes part in the same steps."""
        return self

    def __reduce__(self) -> tuple[type[BatchNormContext], tuple[()]]:
        """Pickle an empty context: a model loaded from a file has no peers."""
        return BatchNormContext, ()

    def gather(self, count: float, values_VC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803  # shape in the name
        """Return the counts of all ranks, by rank, as (W,) float64, and their values as (W, V, C); both may be on CPU.

        Args:
            count: this rank's values per channel; 0 if they do not count, and then they are zeros for all.
            values_VC: this rank's values, of any dtype, on any device; (V, C) is the same on every rank.

        Raises:
            PeerLost: the group is broken.
        """
        what, ranks, group = "the statistics of a BatchNorm layer", 1, self.group
        if group is not None and self.on_device:
            rows_WK = values_VC.new_zeros((group.world_size, values_VC.numel() + 1), dtype=torch.float64)  # noqa: N806  # shape in the name
            if count:
                rows_WK[group.rank, :-1] = values_VC.detach().reshape(-1)
                rows_WK[group.rank, -1] = count
            group.wait(group.all_reduce(rows_WK.view(-1)), what)
        else:
            row_K = torch.zeros(values_VC.numel() + 1, dtype=torch.float64)  # noqa: N806  # shape in the name
            if count:
                row_K[:-1] = values_VC.detach().reshape(-1)
                row_K[-1] = count
            data = row_K.numpy().tobytes()
            if group is not None:
                gathering = group.gather(data, Purpose.BATCH_NORM)
                group.wait(gathering, what)
                ranks, data = len(gathering.rows), b"".join(gathering.rows)
            rows_WK = torch.frombuffer(bytearray(data), dtype=torch.float64).view(ranks, -1)  # noqa: N806  # as above
        return rows_WK[:, -1], rows_WK[:, :-1].reshape(-1, *values_VC.shape)


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
        moments: (3, C) in the layer's dtype, on its device: the mean, the variance with divisor ``count`` (biased, used
            for normalising), and the variance with divisor ``count - 1`` (unbiased, for the running statistics).
        count: number of values per channel, samples times positions; one element.
    """

    moments: torch.Tensor
    count: torch.Tensor


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
        context = self.heterotrain_context
        statistics = None if context.is_alone else channel_statistics(input, context)
        if statistics is None:
            count = input.numel() / input.shape[1]
        else:  # on a device, where the step has more than one sample, this is not read
            count = math.inf if context.on_device else float(statistics.count)
        if count < LEAST_VALUES:
            if not context.is_short:
                raise UsageError(
                    f"layer {self.heterotrain_name!r} needs more than one value per channel, but a step has "
                    f"{count:g} over all ranks: use a larger global batch, GroupNorm or LayerNorm"
                )
            return by_running_statistics(self, input)
        if statistics is None:  # torch's own kernels, and no copy to the host, for which a GPU would be waited for
            return super().forward(input)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(statistics, self.running_mean, self.running_var)
        over: _Over = (statistics, self.eps, context)
        output: torch.Tensor = _Normalise.apply(input, self.weight, self.bias, over)
        return output.to(input.dtype)

    def _track(self, statistics: ChannelStatistics, running_mean: torch.Tensor, running_var: torch.Tensor) -> None:
        share: Any = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = self.num_batches_tracked.to(running_mean).reciprocal_()
        mean, _, unbiased = statistics.moments
        running_mean.lerp_(mean.to(running_mean), share)
        running_var.lerp_(unbiased.to(running_var), share)


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
    wide = _wide(x.detach())
    var_C, mean_C = torch.var_mean(wide, dim=_others(x), correction=0)  # noqa: N806  # shapes in names
    count = x.numel() / x.shape[1] if context.counts else 0.0
    counts_W, values = context.gather(count, torch.stack((mean_C, var_C)))  # noqa: N806  # shapes in names
    total = counts_W.sum()
    weight_W1 = (counts_W / total)[:, None]  # noqa: N806  # shapes in names
    mean = (weight_W1 * values[:, 0]).sum(0)
    biased = (weight_W1 * (values[:, 1] + (values[:, 0] - mean) ** 2)).sum(0)
    moments = torch.stack((mean, biased, biased * (total / (total - 1.0).clamp(min=1.0))))
    return ChannelStatistics(moments=moments.to(wide.device, wide.dtype), count=total)


_Over: TypeAlias = tuple[ChannelStatistics, float, BatchNormContext]
"""The statistics, what is added to the variance, and the step."""


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, with the gradient through mean and variance of all ranks.

    Torch's kernels for given statistics compute the output, the gradient without that through the statistics, and the
    sums ``sum(d)`` and ``sum(d h)`` of this rank; then one more pass subtracts what goes through the statistics.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, over: _Over
    ) -> torch.Tensor:
        statistics, ctx.eps, ctx.context = over
        wide = _wide(x)
        mean, variance, _ = statistics.moments
        gain, shift = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
        ctx.save_for_backward(wide, mean, variance, gain)
        ctx.dtypes = [None if each is None else each.dtype for each in (x, weight, bias)]
        ctx.count, ctx.counts = statistics.count, ctx.context.counts
        return nn.functional.batch_norm(wide, mean, variance, gain, shift, training=False, eps=ctx.eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wide, mean, variance, gain = ctx.saved_tensors
        through, sum_dh, sum_d = torch.ops.aten.native_batch_norm_backward(
            gradients[0], wide, gain, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        _, values = ctx.context.gather(float(ctx.counts), torch.stack((sum_dh, sum_d)))
        if ctx.counts:
            means = (values.sum(0) / ctx.count).to(wide.device, wide.dtype)
            scale = (variance + ctx.eps).rsqrt_()
            shares = means * (scale if gain is None else scale.mul_(gain))
            through -= nn.functional.batch_norm(wide, mean, variance, shares[0], shares[1], training=False, eps=ctx.eps)
        else:
            through = torch.zeros_like(wide)
        found = zip((through, sum_dh, sum_d), ctx.dtypes, strict=True)
        return *(None if dtype is None else each.to(dtype) for each, dtype in found), None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp32, or in fp64 if it has that dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _others(x: torch.Tensor) -> list[int]:
    """Return all dimensions except the channel dimension."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _by_channel(x: torch.Tensor) -> list[int]:
    """Return the shape in which a vector over channels broadcasts to the tensor."""
    return [1, -1, *([1] * (x.dim() - 2))]
