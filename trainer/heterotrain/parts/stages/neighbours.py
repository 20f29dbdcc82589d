"""Tensors between the stages of a pipeline: sent in the background, received with their shapes.

Each tensor follows a message with its shape and format, so micro-batches may differ in size. Tensors travel through
the CPU's memory. Waits end soon after a rank of the member is lost.
"""

from __future__ import annotations

import torch

from heterotrain.errors import UsageError
from heterotrain.network.gloo.bounded_wait import BoundedWait
from heterotrain.network.gloo.member_group import MemberGroup

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
MOST_DIMENSIONS = 12
HEADER = MOST_DIMENSIONS + 3


class Neighbours:
    """The messages of one stage."""

    def __init__(self, group: MemberGroup, device: torch.device) -> None:
        """Use the member's connections; received tensors go to the device."""
        self._group = group
        self._device = device
        self._sending: list[tuple[torch.Tensor, BoundedWait]] = []

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor, and whether it needs a gradient.

        Raises:
            PeerLost: a rank of the member is lost.
            UsageError: the tensor cannot be sent.
        """
        if tensor.dtype not in DTYPES or tensor.dim() > MOST_DIMENSIONS:
            raise UsageError(f"a stage returns a tensor of {tensor.dtype} with {tensor.dim()} dimensions")
        shape = [*tensor.shape, *[0] * (MOST_DIMENSIONS - tensor.dim())]
        header = torch.tensor([tensor.dim(), DTYPES.index(tensor.dtype), int(tensor.requires_grad), *shape])
        values = tensor.detach().to("cpu").contiguous()
        for message in (header, values):
            self._sending.append((message, self._group.start("send", message, rank, 0)))

    def receive(self, rank: int) -> torch.Tensor:
        """Return the next tensor from a rank.

        Raises:
            PeerLost: a rank of the member is lost.
        """
        header = torch.empty(HEADER, dtype=torch.int64)
        self._group.collective("recv", ([header], rank, 0), {})
        dimensions, dtype, needs_gradient, *shape = header.tolist()
        values = torch.empty(shape[:dimensions], dtype=DTYPES[dtype])
        self._group.collective("recv", ([values], rank, 0), {})
        return values.to(self._device).requires_grad_(bool(needs_gradient))

    def flush(self, keep: int = 0) -> None:
        """Wait until all messages but the last ``keep`` ones have left.

        Raises:
            PeerLost: a rank of the member is lost.
        """
        while len(self._sending) > keep:
            self._group.finish("send", self._sending[0][1])
            self._sending.pop(0)

    def forget(self) -> None:
        """Leave messages behind after the connections were cut; their memory stays until they have ended."""
        for _, wait in self._sending:
            if not wait.is_done:
                _LEFT.append(wait)
        self._sending.clear()


_LEFT: list[BoundedWait] = []
