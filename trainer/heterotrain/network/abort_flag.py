"""A flag in memory that an accelerator reads: raised before a communicator is aborted."""

from __future__ import annotations

import torch


class AbortFlag:
    """0.0, and 1.0 as soon as a communicator of the formation may have been aborted.

    An aborted sum ends in the middle and looks finished. It ends after the flag was raised, so whoever reads 0.0 on the
    device, behind the sum, has a whole one (docs/adr/0053). Page-locked memory is read when the device reaches the
    read, and not when the host queues it.
    """

    def __init__(self, *, is_pinned: bool = False) -> None:
        """Make a flag that is down; ``is_pinned``: a device reads it behind work that may be aborted."""
        self._word = torch.zeros((), dtype=torch.float64, pin_memory=is_pinned)

    def lift(self) -> None:
        """Raise the flag; safe from any thread."""
        self._word.fill_(1.0)

    @property
    def is_up(self) -> bool:
        """Whether it was raised."""
        return bool(self._word)

    def on(self, device: torch.device) -> torch.Tensor:
        """Queue a read of the flag behind the device's work; return the number there."""
        return self._word.to(device, non_blocking=True)
