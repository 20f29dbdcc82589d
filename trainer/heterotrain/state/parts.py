"""Tensors as one long sequence of bytes, cut into parts of equal length, and their copies in host memory.

Transfers and fingerprints cut by bytes, not by tensors, so that a huge tensor is divided too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)`` of one tensor."""

    tensor: int
    start: int
    stop: int


def sizes_bytes(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the length of each tensor."""
    return tuple(tensor.numel() * tensor.element_size() for tensor in tensors)


def byte_ranges(lengths_bytes: Sequence[int], start: int, stop: int) -> tuple[ByteRange, ...]:
    """Return bytes ``[start, stop)`` of the sequence of all tensors, as byte ranges of single tensors.

    Args:
        lengths_bytes: the length of each tensor, in order.
        start: first byte.
        stop: the byte after the last one; at most the sum of all lengths.
    """
    ends = list(accumulate(lengths_bytes))
    found = []
    tensor = bisect_right(ends, start)
    while start < stop:
        end = min(stop, ends[tensor])
        if end > start:
            begins = ends[tensor] - lengths_bytes[tensor]
            found.append(ByteRange(tensor, start - begins, end - begins))
        start, tensor = end, tensor + 1
    return tuple(found)


def bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``[0, total)`` into ``parts`` ranges (at least one) whose lengths differ by at most 1."""
    return [(total * part // parts, total * (part + 1) // parts) for part in range(parts)]


def cut(lengths_bytes: Sequence[int], parts: int) -> tuple[tuple[ByteRange, ...], ...]:
    """Cut the sequence of all tensors into ``parts`` whose lengths differ by at most one byte.

    Args:
        lengths_bytes: the length of each tensor, in order.
        parts: at least 1.
    """
    return tuple(byte_ranges(lengths_bytes, start, stop) for start, stop in bounds(sum(lengths_bytes), parts))


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


def pack(tensors: Sequence[torch.Tensor], byte_ranges: Sequence[ByteRange], into: torch.Tensor | None) -> torch.Tensor:
    """Copy byte ranges to host memory, one after the other.

    Args:
        tensors: the whole state, on any device.
        byte_ranges: the part to copy.
        into: memory of an earlier copy, reused if it has the right length: new memory costs more than copying.
    """
    length = sum(byte_range.stop - byte_range.start for byte_range in byte_ranges)
    if into is None or into.numel() != length:
        into = host_memory(length, pin=any(tensor.is_cuda for tensor in tensors))
    position = 0
    for byte_range in byte_ranges:
        count = byte_range.stop - byte_range.start
        source = byte_view(tensors[byte_range.tensor])[byte_range.start : byte_range.stop]
        into[position : position + count].copy_(source, non_blocking=source.is_cuda)
        position += count
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return into
