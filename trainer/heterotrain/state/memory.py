"""Tensors as bytes, and their copies in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def sizes_bytes(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the length of each tensor."""
    return tuple(tensor.numel() * tensor.element_size() for tensor in tensors)


def bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``[0, total)`` into ``parts`` ranges (at least one) whose lengths differ by at most 1."""
    return [(total * part // parts, total * (part + 1) // parts) for part in range(parts)]


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as flat bytes; they share the tensor's memory when it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes that can be read and written."""
    view: Any = byte_view(tensor).numpy()
    return memoryview(view)


def host_memory(length_bytes: int, *, pin: bool) -> torch.Tensor:
    """Return memory that is really allocated, not only reserved; page-locked (``pin``) for copies from a device."""
    return torch.empty(length_bytes, dtype=torch.uint8, pin_memory=pin).fill_(0)


def pack(tensors: Iterable[torch.Tensor], length_bytes: int, into: torch.Tensor | None, *, pin: bool) -> torch.Tensor:
    """Copy tensors to host memory as bytes, one after the other.

    Args:
        tensors: on any device.
        length_bytes: their size.
        into: memory of an earlier copy, reused if it has the right length: new memory costs more than copying.
        pin: whether some are on an accelerator.
    """
    if into is None or into.numel() != length_bytes:
        into = host_memory(length_bytes, pin=pin)
    position = 0
    for tensor in tensors:
        source = byte_view(tensor)
        into[position : position + source.numel()].copy_(source, non_blocking=source.is_cuda)
        position += source.numel()
    if pin:
        torch.cuda.synchronize()
    return into
