"""Blocks as slow as on devices of different speeds, by waits."""

from __future__ import annotations

import time
from typing import Any

import torch


class _Wait(torch.autograd.Function):
    """Return the input after a wait; the gradient waits for twice as long."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Wait in proportion to the samples."""
        context.seconds = seconds
        time.sleep(seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Wait for twice as long."""
        time.sleep(2 * context.seconds * len(gradients[0]))
        return gradients[0], None


class Paced(torch.nn.Module):
    """A block, and the wait that makes it as slow as on the emulated device."""

    def __init__(self, block: torch.nn.Module, seconds: float) -> None:
        """Wrap a block that takes so many seconds for the forward pass of a sample."""
        super().__init__()
        self.block, self.seconds = block, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values after the block."""
        found: torch.Tensor = _Wait.apply(self.block(x), self.seconds)  # type: ignore[no-untyped-call]  # as torch
        return found
