"""A number that the host reads while the device is still busy with later work.

``float(tensor)`` waits for everything that the device has been given so far. The loss is known after the forward pass,
so reading it that way before the vote would make the vote wait for the whole backward pass.
"""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of one number in page-locked memory, made when the device has finished the work queued before it."""

    def __init__(self, value: torch.Tensor) -> None:
        """Queue the copy.

        Args:
            value: one element, in a CUDA device's memory.
        """
        self._value = value.to("cpu", non_blocking=True)
        self._made = torch.cuda.Event()
        self._made.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        """Wait for the copy, not for work that was queued after it; return the number.

        Raises:
            RuntimeError: the device has failed.
        """
        self._made.synchronize()
        return float(self._value)
