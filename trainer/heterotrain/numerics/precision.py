"""In which number format the forward pass runs, and the loss scale that keeps fp16 gradients from vanishing.

Parameters, gradients in the buckets and optimizer state stay in the model's own format (torch.autocast). All ranks use
the same format, scale by the same factor and leave out the same steps: the factor is replicated state, and whether a
step's gradient is usable is seen on the sum over ranks, which is the same everywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from heterotrain_core.contract.choices import Precision

from heterotrain.errors import UsageError
from heterotrain.network.group import Group

FIRST_SCALE = 2.0**16
GROW_AFTER = 2000
"""Clean steps after which the loss scale is doubled. The rule is that of Micikevicius et al., "Mixed precision training" (2018);
this and ``FIRST_SCALE`` are what ``torch.amp.GradScaler`` takes unless told otherwise."""
MOST_SCALE = 2.0**24
"""Where doubling ends: far above what a gradient needs, far below where the scaled loss leaves fp32."""
DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor on the loss in fp16: a power of two, so it changes no digit of the gradient.

    Attributes:
        factor: on the loss, from 1 to ``MOST_SCALE``.
        clean_steps: committed steps since it last changed.
    """

    factor: float = FIRST_SCALE
    clean_steps: int = 0

    def after(self, *, finite: bool) -> LossScale:
        """Return the scale for the next step: halved when this step's gradient overflowed, doubled after many good ones."""
        if not finite:
            return LossScale(factor=max(1.0, self.factor / 2))
        if self.clean_steps + 1 < GROW_AFTER:
            return LossScale(factor=self.factor, clean_steps=self.clean_steps + 1)
        return LossScale(factor=min(MOST_SCALE, self.factor * 2))


class MixedPrecision:
    """The format in force in the running formation."""

    def __init__(self, setting: Precision, device: torch.device) -> None:
        """Until ranks have agreed, ``AUTO`` is FP32.

        Args:
            setting: the configuration's.
            device: where this rank computes.

        Raises:
            UsageError: this device cannot compute in the format that was asked for.
        """
        self._device = device
        self._is_auto = setting is Precision.AUTO
        self.format = Precision.FP32 if self._is_auto else setting
        if self.format is Precision.BF16 and device.type != "cpu" and not has_bf16(device):
            raise UsageError(
                f"precision BF16 is requested, but {torch.cuda.get_device_name(device)} cannot compute in it: "
                "use precision Auto, FP16 or FP32, or leave this pool out"
            )

    def agree(self, group: Group | None) -> None:
        """Choose the format for a new formation; to be called by all its ranks.

        Args:
            group: its connections; ``None`` for a process that is alone.

        Raises:
            PeerLost: the group is broken.
        """
        if not self._is_auto:
            return
        own = has_bf16(self._device)
        everybody = own if group is None else all(row[0] == 1.0 for row in group.gather_now([float(own)]))
        self.format = Precision.BF16 if everybody else Precision.FP32

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need a loss scale."""
        return self.format is Precision.FP16

    def autocast(self) -> AbstractContextManager[object]:
        """Return what one forward pass runs in; backward takes the formats from there and belongs outside."""
        if self.format is Precision.FP32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=DTYPES[self.format])


def has_bf16(device: torch.device) -> bool:
    """Return whether the device computes in bf16 faster than in fp32.

    That is CUDA from compute capability 8.0 on, the first with matrix units for it (CUDA C++ Programming Guide, "Compute
    capabilities"); a plain processor may have such units as well, but its ranks take part in fp32.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
