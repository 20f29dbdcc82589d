"""Number format of the forward pass, and the loss scale that keeps fp16 gradients from vanishing.

Parameters, gradients in the buckets and optimizer state stay in the model's own format (torch.autocast). All ranks use
the same format, scale by the same factor and skip the same steps. The factor is replicated state, and whether a
step's gradient is usable is decided on the sum over ranks, which is the same on every rank.
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
"""Steps without overflow after which the loss scale is doubled.

The rule is from Micikevicius et al., "Mixed precision training" (2018). This value and ``FIRST_SCALE`` are the defaults
of ``torch.amp.GradScaler``.
"""
MOST_SCALE = 2.0**24
"""Upper limit of the loss scale: far above any gradient's need, far below an overflow of the scaled loss in fp32."""
DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor on the loss in fp16: a power of two, so it does not round the gradient.

    Attributes:
        factor: on the loss, from 1 to ``MOST_SCALE``.
        clean_steps: committed steps since it last changed.
    """

    factor: float = FIRST_SCALE
    clean_steps: int = 0

    def after(self, *, finite: bool) -> LossScale:
        """Return the next step's scale: halved if this step's gradient overflowed, doubled after many clean steps."""
        if not finite:
            return LossScale(factor=max(1.0, self.factor / 2))
        if self.clean_steps + 1 < GROW_AFTER:
            return LossScale(factor=self.factor, clean_steps=self.clean_steps + 1)
        return LossScale(factor=min(MOST_SCALE, self.factor * 2))


class MixedPrecision:
    """The number format in the current formation.

    Attributes:
        format: of forward passes.
        casts: whether it is another one than the model's own.
        scales_loss: whether gradients need a loss scale.
    """

    def __init__(self, setting: Precision, device: torch.device) -> None:
        """Choose the configured format; ``AUTO`` is FP32 until the ranks have agreed.

        Args:
            setting: the configured value.
            device: this rank's device.

        Raises:
            UsageError: this device cannot compute in the configured format.
        """
        self._device = device
        self._is_auto = setting is Precision.AUTO
        self._use(Precision.FP32 if self._is_auto else setting)
        if self.format is Precision.BF16 and device.type != "cpu" and not has_bf16(device):
            raise UsageError(
                f"precision is BF16, but {torch.cuda.get_device_name(device)} cannot compute in it. "
                "Use precision Auto, FP16 or FP32, or leave this pool out."
            )

    def agree(self, group: Group | None) -> None:
        """Choose the format for a new formation; all its ranks have to call this.

        Args:
            group: its connections; ``None`` for a process without peers.

        Raises:
            PeerLost: the group is broken.
        """
        if not self._is_auto:
            return
        own = has_bf16(self._device)
        on_all = own if group is None else all(row[0] == 1.0 for row in group.gather_now([float(own)]))
        self._use(Precision.BF16 if on_all else Precision.FP32)

    def _use(self, chosen: Precision) -> None:
        self.format, self.casts, self.scales_loss = chosen, chosen is not Precision.FP32, chosen is Precision.FP16

    @property
    def gather_dtype(self) -> torch.dtype | None:
        """The format in which a divided model's parameters are gathered; ``None`` for their own.

        With ``AUTO`` the format depends on the formation, and parameters are gathered in their own.
        """
        return None if self._is_auto else DTYPES.get(self.format)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context manager for one forward pass; the backward pass belongs outside it."""
        if not self.casts:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=DTYPES[self.format])


def has_bf16(device: torch.device) -> bool:
    """Return whether the device computes in bf16 faster than in fp32.

    This holds for CUDA from compute capability 8.0, the first with bf16 matrix units (CUDA C++ Programming Guide,
    "Compute capabilities"). Some CPUs have such units too, but ranks on CPUs use FP32 with ``AUTO``.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
