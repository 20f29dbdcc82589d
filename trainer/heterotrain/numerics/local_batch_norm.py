"""BatchNorm as in DistributedDataParallel: each rank normalises each micro-batch by its own statistics.

Only the running statistics, which evaluation uses, have to be the same on all ranks. They change once for each
reduction of the gradient, by the mean of the changes that the micro-batches would have made, each with its samples.
With micro-batch j of rank i having ``n_ij`` of the batch's ``n`` samples, and layers that take ``r`` to ``r_ij``,

    r' = r + sum_ij n_ij/n (r_ij - r)

So the statistics do not depend on the number of ranks and micro-batches, and are replicated state between steps:
evaluation, checkpoints and joining ranks see the same values. The sum is one more small all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _LazyNormBase, _NormBase  # the only common bases

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.network.two_levels import Reduction
from heterotrain.numerics.batch_norm import LEAST_VALUES, GlobalBatchNorm, by_running_statistics

BATCH_NORM = nn.modules.batchnorm._BatchNorm  # noqa: SLF001  # the only common base


class LocalBatchNorm(BATCH_NORM):
    """Mixin for BatchNorm layers: the running statistics normalise a micro-batch with one value per channel.

    Torch's own layers refuse it. Here shares decide about the size of a micro-batch, and the script does not.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the base class names it
        """Normalise (N, C, *) by channel, as torch's own layer does."""
        if self.training and input.numel() < LEAST_VALUES * input.shape[1]:
            self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return by_running_statistics(self, input)
        return super().forward(input)


class LocalBatchNorm1d(LocalBatchNorm, nn.BatchNorm1d):
    """Over (N, C) or (N, C, L)."""


class LocalBatchNorm2d(LocalBatchNorm, nn.BatchNorm2d):
    """Over (N, C, H, W)."""


class LocalBatchNorm3d(LocalBatchNorm, nn.BatchNorm3d):
    """Over (N, C, D, H, W)."""


LOCAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: LocalBatchNorm1d,
    nn.BatchNorm2d: LocalBatchNorm2d,
    nn.BatchNorm3d: LocalBatchNorm3d,
}


def localise(model: nn.Module) -> None:
    """Let every BatchNorm layer of the model accept micro-batches of one sample; the layers stay the same objects.

    Raises:
        UsageError: a layer exchanges statistics by itself, or has no shape yet.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm | _LazyNormBase):
            raise UsageError(
                f"layer {name!r} is a {type(module).__name__}, which cannot be trained with batch_norm='local': use "
                "BatchNorm1d, BatchNorm2d or BatchNorm3d. For statistics over all ranks use batch_norm='global'."
            )
        module.__class__ = LOCAL.get(type(module), type(module))


class RunningStatistics:
    """Running statistics of the layers that normalise by themselves: the same on all ranks after each reduction.

    These are all layers with running statistics, such as BatchNorm and InstanceNorm, but none over the global batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[_NormBase] = []
        self._names: list[str] = []
        self._buffers: list[torch.Tensor] = []
        self._before = self._sums = torch.empty(0)
        self._views: list[torch.Tensor] = []
        self._counts: list[tuple[torch.Tensor, torch.Tensor, _NormBase]] = []
        self._work: Reduction | None = None

    def find(self) -> None:
        """Look for the layers again: the model has changed."""
        found = {
            name: layer
            for name, layer in self._model.named_modules()
            if isinstance(layer, _NormBase) and not isinstance(layer, GlobalBatchNorm)
        }
        tracking = {name: layer for name, layer in found.items() if layer.running_mean is not None}
        self._names, self._layers = list(tracking), list(tracking.values())

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers of the layers: between steps they are the same on every rank."""
        for name, layer in zip(self._names, self._layers, strict=True):
            yield from layer.named_buffers(prefix=name, recurse=False)

    def begin(self) -> None:
        """Remember the statistics before the micro-batches of a reduction."""
        if not self._layers:
            return
        self._buffers = list(self._of_layers())
        dtype = torch.float32
        for buffer in self._buffers:
            dtype = torch.promote_types(dtype, buffer.dtype)
        self._before = torch.cat([buffer.detach().reshape(-1).to(dtype) for buffer in self._buffers])
        self._views = list(self._parts(self._before))
        self._sums = torch.zeros_like(self._before)  # a new one: a broken reduction may still write to the last one
        self._counts = [
            (layer.num_batches_tracked, layer.num_batches_tracked.clone(), layer)
            for layer in self._layers
            if layer.num_batches_tracked is not None
        ]
        self._work = None

    def add(self, samples: int) -> None:
        """Take up a micro-batch's changes, and put the earlier statistics back; 0 samples drop its changes."""
        if not self._layers:
            return
        with torch.no_grad():
            if samples:
                now = torch.cat([buffer.reshape(-1).to(self._before) for buffer in self._buffers])
                self._sums.add_(now.sub_(self._before), alpha=samples)
            self._put_back()

    def start(self, group: Group | None) -> None:
        """Start to sum over all ranks; every rank has to call this after the last bucket has started.

        Raises:
            PeerLost: the group is broken.
        """
        if self._layers and group is not None and group.world_size > 1:
            self._work = group.all_reduce(self._sums)

    def wait(self, group: Group | None) -> None:
        """Wait for the sum.

        Raises:
            PeerLost: the group is broken.
        """
        work, self._work = self._work, None
        if work is not None and group is not None:
            group.wait(work, "running statistics")

    def finish(self, batch_samples: int) -> None:
        """Give the layers their new statistics; ``batch_samples``: samples over all ranks."""
        if not self._layers:
            return
        with torch.no_grad():
            self._before.add_(self._sums, alpha=1.0 / batch_samples)
            self._put_back()
            for count, _, layer in self._counts:
                count.add_(int(layer.training and isinstance(layer, BATCH_NORM)))  # InstanceNorm does not count

    def _put_back(self) -> None:
        torch._foreach_copy_(self._buffers, self._views)
        for count, before, _ in self._counts:
            count.copy_(before)

    def _of_layers(self) -> Iterator[torch.Tensor]:
        for layer in self._layers:
            found: tuple[Any, ...] = (layer.running_mean, layer.running_var)
            yield from (buffer for buffer in found if buffer is not None)

    def _parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield views into a flat tensor with the shapes of the buffers."""
        start = 0
        for buffer in self._buffers:
            yield flat[start : start + buffer.numel()].view_as(buffer)
            start += buffer.numel()
