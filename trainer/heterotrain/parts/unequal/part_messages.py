"""Messages between the ranks of a member that divide every tensor: parts go to all ranks, or sums of parts to each one.

All messages of an exchange travel at the same time, directly, and pass through the CPU's memory. Ranks tell them apart
by their order, so all ranks begin the same exchanges in the same order. They may end them later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heterotrain.network.gloo.bounded_wait import BoundedWait, ThreadedWait
from heterotrain.network.gloo.member_group import MemberGroup

TAG = 7
"""Of the messages; those between two ranks arrive in their order."""


class PartExchange:
    """Sends a tensor to each other rank, and receives one from each."""

    def __init__(self, group: MemberGroup, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Begin; neither tensors may be changed before ``finish``.

        Args:
            group: the ranks.
            sent: by rank; this rank's own is left alone, and so are those without elements.
            received: by rank, likewise.

        Raises:
            PeerLost: another rank of the member is lost or has left the pass.
        """
        self._group = group
        own = group.rank()
        self._receiving: list[tuple[ThreadedWait, int, torch.Tensor, torch.Tensor]] = []
        self._sending: list[BoundedWait] = []
        for rank, target in enumerate(received):
            if rank != own and target.numel():
                buffer = target if target.is_cpu else torch.empty_like(target, device="cpu")
                self._receiving.append((group.start("receive", buffer, rank, TAG), rank, buffer, target))
        copies: dict[int, torch.Tensor] = {}  # the same tensor may go to all ranks
        for rank, source in enumerate(sent):
            if rank != own and source.numel():
                message = copies.setdefault(source.data_ptr(), source.detach().cpu())
                self._sending.append(group.start("send", message, rank, TAG))

    def receive(self) -> None:
        """Wait until all messages have arrived.

        Raises:
            PeerLost: as above.
        """
        for wait, _, buffer, target in self._receiving:
            self._group.finish("receive", wait)
            if buffer is not target:
                target.copy_(buffer)
        if self._receiving:
            self._group.note_received([(wait, rank, buffer.nbytes) for wait, rank, buffer, _ in self._receiving])
        self._receiving.clear()

    def finish(self) -> None:
        """Wait until all messages have arrived and left.

        Raises:
            PeerLost: as above.
        """
        self.receive()
        for wait in self._sending:
            self._group.finish("send", wait)
        self._sending.clear()


def sum_of_parts(group: MemberGroup, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Send each rank its part, and return the sum of what all ranks have for this one, in this rank's own part.

    As many parts are received at a time as take no more memory than all of ``parts``. They are added in the order of
    ranks, so a repeated sum is equal bit by bit.

    Args:
        group: the ranks.
        parts: by rank.

    Raises:
        PeerLost: another rank of the member is lost or has left the pass.
    """
    own = group.rank()
    others = [rank for rank in range(len(parts)) if rank != own]
    at_a_time = max(1, sum(part.numel() for part in parts) // max(1, parts[own].numel()))
    empty = parts[own][:0]
    total = parts[own]
    exchanges: list[PartExchange] = []
    for begin in range(0, len(others), at_a_time):
        found = {rank: torch.empty_like(total) for rank in others[begin : begin + at_a_time]}
        received = [found.get(rank, empty) for rank in range(len(parts))]
        # All that this rank sends leaves at once. A rank that waited for it here could wait for another one that waits.
        exchanges.append(PartExchange(group, parts if not exchanges else [empty] * len(parts), received))
        exchanges[-1].receive()
        for part in found.values():
            total += part
    for exchange in exchanges:
        exchange.finish()
    return total
