"""BatchNorm as in DistributedDataParallel: each rank normalises each micro-batch by its own statistics.

Only the running statistics, which evaluation uses, have to be the same on all ranks. They change once for each
reduction of the gradient, by the mean of the changes that the micro-batches would have made, each with its samples
(``forward_state``).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _LazyNormBase  # the only common base

from heterotrain.errors import UsageError
from heterotrain.numerics.batch_norm import LEAST_VALUES, by_running_statistics

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
