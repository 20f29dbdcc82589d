"""A part of a checkpoint: a safetensors file with whole tensors and rows of tensors, and which rank writes which.

A safetensors file is the length of its header, the header as JSON, and the bytes of its tensors one after the other.
It is written here, because the package would need a second copy of all bytes; any reader of the format can read it.
The header's metadata say which rows of which tensor an entry is, for ours and for torch's distributed checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from heterotrain.state.balance import shared
from heterotrain.state.layout import sizes_of
from heterotrain.state.memory import bounds, pack
from heterotrain.state.ranges import Holding, OwnedRange, TensorRange, pieces_of, whole
from heterotrain.state.tensors import Entry, Flat, Held

ALIGNMENT_BYTES = 8
LARGEST_ROW_BYTES = 64 << 20
"""A tensor with larger rows is cut inside of rows."""
ROWS = "heterotrain.rows"
SHARDING = "DCP_SHARDING_INFO"
"""Key under which ``torch.distributed.checkpoint.HuggingFaceStorageReader`` looks for the place of a tensor's part."""
TAGS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
"""Formats that a safetensors file knows. Tensors of others are stored as bytes (``U8``)."""
Chosen = list[tuple[Held, TensorRange]]
"""Elements of what a rank holds."""


def row_elements(shape: Sequence[int]) -> int:
    """Return the number of elements that one index of the first dimension selects; at least 1."""
    return max(1, math.prod(shape[1:]))


def header_of(ranges: Sequence[tuple[Entry, TensorRange]], *, step: int) -> tuple[bytes, dict[TensorRange, int]]:
    """Return the beginning of a safetensors file, and the place of the first byte of each range in the file.

    Args:
        ranges: elements of tensors, in the order of the file.
        step: committed steps.
    """
    tensors: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    places: dict[TensorRange, int] = {}
    reached = 0
    for entry, own in ranges:
        key = own.name if own.name not in tensors else f"{own.name}#{own.start}"
        row, size_bytes = row_elements(entry.shape), own.elements * entry.dtype.itemsize
        cuts_a_row = bool(own.start % row or own.stop % row)
        shape: Sequence[int] = entry.shape
        if entry.dtype not in TAGS:
            shape = (size_bytes,)
        elif own != entry.whole:
            shape = (own.elements,) if cuts_a_row else (own.elements // row, *entry.shape[1:])
        tag = TAGS.get(entry.dtype, "U8")
        tensors[key] = {"dtype": tag, "shape": shape, "data_offsets": [reached, reached + size_bytes]}
        if shape != entry.shape:
            rows[key] = {"of": own.name, "shape": entry.shape, "start": own.start, "stop": own.stop}
        if key == own.name and not cuts_a_row:
            sharding[key] = {"saved_offsets": [own.start // row, *(0 for _ in entry.shape[1:])] if entry.shape else []}
        places[own] = reached
        reached += size_bytes
    about = {"format": "pt", "heterotrain.step": str(step), ROWS: json.dumps(rows), SHARDING: json.dumps(sharding)}
    text = json.dumps({"__metadata__": about, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, {own: len(header) + place for own, place in places.items()}


def cut(flat: Flat, index: int, count: int) -> Chosen:
    """Return part ``index`` of ``count`` of a state that this rank holds whole, cut evenly by bytes, between rows."""
    sizes = [held.entry.size_bytes for held in flat.held]
    start, stop = bounds(sum(sizes), count)[index]
    chosen, begin = [], 0
    for held, size in zip(flat.held, sizes, strict=True):
        entry = held.entry
        row, of_element = row_elements(entry.shape), entry.dtype.itemsize
        if row * of_element > LARGEST_ROW_BYTES:
            row = 1
        first, last = (_cut_at(entry.whole, (end - begin) // of_element, row) for end in (start, stop))
        if first < last or (not size and not index):
            chosen.append((held, TensorRange(entry.name, first, last)))
        begin += size
    return chosen


def own(flat: Flat, rank: int, holdings: Sequence[Holding | None], shapes: Mapping[str, tuple[int, ...]]) -> Chosen:
    """Return what a rank writes of a state that ranks hold in parts: every element is written by one of its holders.

    Args:
        flat: what this rank holds.
        rank: this rank.
        holdings: what each rank holds of parameters and buffers; ``None`` for everything.
        shapes: of all parameters of the whole model.
    """
    writes = writers(holdings, shapes)
    lowest: dict[str, int] = {}
    for other, holding in reversed(list(enumerate(holdings))):
        lowest |= {name: other for name, held in (holding or whole(sizes_of(shapes))).items() if held.elements}
    first_whole = next((other for other, holding in enumerate(holdings) if holding is None), None)
    chosen: Chosen = []
    for held in flat.held:
        entry = held.entry
        if entry.divided:
            written = writes(rank, entry.of)
            chosen += [(held, TensorRange(entry.name, each.start, each.stop)) for each in written]
            continue
        writer = lowest.get(entry.of, first_whole or 0) if entry.of else 0
        if first_whole is not None and entry.of and entry.of not in shapes:  # a buffer, which whole ranks do not list
            writer = min(writer, first_whole)
        if writer == rank:
            chosen.append((held, entry.whole))
    return chosen


def writers(
    holdings: Sequence[Holding | None], shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[int, str], list[TensorRange]]:
    """Return a function of rank and parameter: the elements that the rank writes, such that all write as much."""
    sizes = sizes_of(shapes)
    everything = whole(sizes)
    parameters = [
        everything if holding is None else {name: held for name, held in holding.items() if name in sizes}
        for holding in holdings
    ]
    by_owners: dict[tuple[int, ...], list[OwnedRange]] = {}
    for piece in pieces_of(sizes, parameters):
        by_owners.setdefault(piece.owners, []).append(piece)
    amounts = shared([(sum(piece.elements for piece in pieces), owners) for owners, pieces in by_owners.items()])
    found: dict[tuple[int, str], list[TensorRange]] = {}
    for given, pieces in zip(amounts, by_owners.values(), strict=True):
        begin = 0  # of the piece, among all elements with these owners
        for piece in pieces:
            start, row = 0, row_elements(shapes[piece.name])
            for rank in sorted(given):
                stop = start + given[rank]
                first, last = (_cut_at(piece, end - begin, row) for end in (start, stop))
                if first < last:
                    found.setdefault((rank, piece.name), []).append(TensorRange(piece.name, first, last))
                start = stop
            begin += piece.elements
    return lambda rank, name: found.get((rank, name), [])


def packed(chosen: Chosen, into: torch.Tensor | None) -> torch.Tensor:
    """Copy a part's data to host memory; ``into`` is reused if it has the right length."""
    pin = any(held.values.is_cuda for held, _ in chosen)
    return pack((held.values_in(own) for held, own in chosen), size_bytes(chosen), into, pin=pin)


def size_bytes(chosen: Chosen) -> int:
    """Return the size of a part's data."""
    return sum(own.elements * held.entry.dtype.itemsize for held, own in chosen)


def _cut_at(own: TensorRange, elements: int, row: int) -> int:
    """Return the element of a range at which it is cut after some elements: the start of a row, or an end."""
    if elements <= 0:
        return own.start
    if elements >= own.elements:
        return own.stop
    return max(own.start, (own.start + elements) // row * row)
