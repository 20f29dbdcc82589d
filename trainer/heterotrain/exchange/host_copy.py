"""Numbers that the host reads while the device is still busy with later work.

``float(tensor)`` waits for everything that the device has been given so far. The loss is known after the forward pass,
so reading it that way before the vote would make the vote wait for the whole backward pass.
"""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of numbers in page-locked memory, made when the device has finished the work queued before it."""

    def __init__(self, value: torch.Tensor) -> None:
        """Queue the copy.

        Args:
            value: in a CUDA device's memory, or on the CPU.
        """
        self._value = value.to("cpu", non_blocking=True)
        self._made: torch.cuda.Event | None = None
        if value.is_cuda:
            self._made = torch.cuda.Event()
            self._made.record(torch.cuda.current_stream(value.device))

    def numbers(self) -> list[float]:
        """Wait for the copy, not for work that was queued after it; return the numbers.

        Raises:
            RuntimeError: the device has failed.
        """
        if self._made is not None:
            self._made.synchronize()
        return list(self._value.reshape(-1).tolist())

    def __float__(self) -> float:
        """Wait as in ``numbers``; return the only number."""
        (number,) = self.numbers()
        return number
