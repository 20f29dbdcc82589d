"""Rows of all ranks in one tensor, for losses that compare samples of different ranks (contrastive learning).

Every rank has ``n_i`` rows, its samples; the result has all ``sum_i n_i`` rows on every rank, by rank. Ranks may have
different numbers of rows, or none. In backward, the gradient of a rank's own rows is the sum of the gradients that all
ranks computed for them, in the same order on every rank. A rank's loss is the mean over its own rows, and ``backward``
weights it with ``n_i / B``. So with one micro-batch on each rank the reduced gradient is that of one process with the
whole batch of ``B`` samples, up to rounding.

The rows travel over the formation's control connections, through the host's memory. They neither reorder nor delay the
gradient buckets.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Payload, Purpose
from heterotrain.state.memory import memory_of

HEADER_BYTES = 256
WHAT = "step.all_gather"


class Gathered(NamedTuple):
    """The rows of all ranks.

    Attributes:
        rows: all rows, by rank, on this rank's device.
        start: the first of this rank's own rows in it; they follow each other.
    """

    rows: torch.Tensor
    start: int


def all_gather(own: torch.Tensor, group: Group, *, counts: bool) -> tuple[Gathered, torch.Tensor]:
    """Return the rows of all ranks, and a leaf tensor through which a backward pass reaches this exchange.

    Args:
        own: this rank's rows; the other dimensions and the type are the same on every rank.
        group: the formation's connections.
        counts: whether this rank's rows count. If not, only this rank sees them, and their gradient is zero.

    Raises:
        PeerLost: the group is broken.
        UsageError: the ranks' tensors do not fit together.
    """
    sizes = _sizes(own, group, counts=counts)
    anchor = torch.zeros((), requires_grad=own.requires_grad and torch.is_grad_enabled())
    rows = _AllGather.apply(own, anchor, group, sizes)
    return Gathered(rows=rows, start=sum(sizes[: group.rank])), anchor


def _sizes(own: torch.Tensor, group: Group, *, counts: bool) -> list[int]:
    """Return the number of rows that every rank sends."""
    if own.dim() == 0:
        raise UsageError(f"{WHAT} needs a tensor whose first dimension counts samples, not a scalar")
    kind = f"{str(own.dtype).removeprefix('torch.')}[:{''.join(f', {size}' for size in own.shape[1:])}]"
    header = json.dumps([own.shape[0] if counts else 0, kind]).encode()
    if len(header) > HEADER_BYTES:
        raise UsageError(f"{WHAT} got a tensor with {own.dim()} dimensions: flatten it to (samples, features)")
    gathering = group.gather(header.ljust(HEADER_BYTES), Purpose.GATHER)
    group.wait(gathering, WHAT)
    found = [json.loads(row) for row in gathering.rows]
    for rank, (_, other) in enumerate(found):
        if other != kind:
            raise UsageError(
                f"{WHAT} got {kind} on rank {group.rank} and {other} on rank {rank}: only the first dimension may "
                "differ, and every rank has to make the same calls in the same order"
            )
    return [int(size) for size, _ in found]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, _anchor: torch.Tensor, group: Group, sizes: list[int]) -> torch.Tensor:
        ctx.group, ctx.sizes, ctx.own_rows = group, sizes, own.shape[0]
        mine = own.detach().cpu().contiguous()
        parts = [mine.new_empty((size, *own.shape[1:])) for size in sizes]
        parts[group.rank] = mine  # a rank whose rows do not count sees them nevertheless
        others = [rank for rank in range(group.world_size) if rank != group.rank]
        group.send_receive(
            {rank: _payload(mine) for rank in others if sizes[group.rank]},
            {rank: _payload(parts[rank]) for rank in others if sizes[rank]},
            WHAT, Purpose.GATHER,
        )  # fmt: skip
        return torch.cat(parts).to(own.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, sizes = ctx.group, ctx.sizes
        counts = sizes[group.rank] > 0
        local = list(sizes)
        local[group.rank] = ctx.own_rows
        parts = list(torch.split(gradient.detach().cpu(), local))
        own = parts[group.rank]
        others = [rank for rank in range(group.world_size) if rank != group.rank]
        received = {rank: torch.empty_like(own) for rank in others if counts}
        group.send_receive(
            {
                rank: _payload((parts[rank] if counts else torch.zeros_like(parts[rank])).contiguous())
                for rank in others if sizes[rank]
            },
            {rank: _payload(part) for rank, part in received.items()},
            f"{WHAT}, backward", Purpose.GATHER,
        )  # fmt: skip
        if not counts:
            return torch.zeros_like(own).to(gradient.device), torch.zeros(()), None, None
        wide = torch.promote_types(own.dtype, torch.float32)
        total = torch.zeros_like(own, dtype=wide)
        for rank in range(group.world_size):
            total += own if rank == group.rank else received[rank]
        return total.to(gradient), torch.zeros(()), None, None


def _payload(tensor: torch.Tensor) -> Payload:
    return Payload(tensor.numel() * tensor.element_size(), [memory_of(tensor)])
