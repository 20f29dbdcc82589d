"""A part of a checkpoint: a safetensors file with whole tensors and rows of tensors, and which rank writes which.

A safetensors file is the length of its header, the header as JSON, and the bytes of its tensors one after the other.
It is written here, because the package would need a second copy of all bytes; any reader of the format can read it.
The header's metadata say which rows of which tensor an entry is, for ours and for torch's distributed checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heterotrain.state.balance import shared
from heterotrain.state.holdings import Extent, Holding, pieces_of, whole
from heterotrain.state.layout import sizes_of
from heterotrain.state.parts import ByteRange, bounds, pack
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


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[start, stop)`` of a tensor of the state.

    Attributes:
        name: of the tensor in the state.
        dtype: its format, as torch calls it.
        shape: its whole shape.
        start: first element.
        stop: the element after the last one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Length in the file."""
        return (self.stop - self.start) * self._dtype.itemsize

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape in the file: that of whole rows, or flat."""
        if (self.start, self.stop) == (0, math.prod(self.shape)):
            return self.shape
        row = row_elements(self.shape)
        if self.start % row or self.stop % row:
            return (self.stop - self.start,)
        return ((self.stop - self.start) // row, *self.shape[1:])

    @property
    def offsets(self) -> tuple[int, ...] | None:
        """First index of each dimension; ``None`` for elements that are not whole rows."""
        row = row_elements(self.shape)
        if not self.shape or self.start % row or self.stop % row:
            return None if self.shape else ()
        return (self.start // row, *(0 for _ in self.shape[1:]))

    @property
    def tag(self) -> tuple[str, tuple[int, ...]]:
        """Format and shape as the file states them."""
        tag = TAGS.get(self._dtype)
        return ("U8", (self.size_bytes,)) if tag is None else (tag, self.own_shape)

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def row_elements(shape: Sequence[int]) -> int:
    """Return the number of elements that one index of the first dimension selects; at least 1."""
    return max(1, math.prod(shape[1:]))


def header_of(spans: Sequence[Span], *, step: int) -> bytes:
    """Return the beginning of a safetensors file with these spans in this order."""
    tensors: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    reached = 0
    for span in spans:
        key = span.name if span.name not in tensors else f"{span.name}#{span.start}"
        tag, shape = span.tag
        tensors[key] = {"dtype": tag, "shape": shape, "data_offsets": [reached, reached + span.size_bytes]}
        reached += span.size_bytes
        if shape != span.shape:
            rows[key] = {
                "of": span.name, "shape": span.shape, "start": span.start, "stop": span.stop
            }  # fmt: skip
        if span.offsets is not None and key == span.name:
            sharding[key] = {"saved_offsets": span.offsets}
    about = {"format": "pt", "heterotrain.step": str(step), ROWS: json.dumps(rows), SHARDING: json.dumps(sharding)}
    text = json.dumps({"__metadata__": about, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


Chosen = list[tuple[Held, Extent]]
"""Elements of what a rank holds."""


def cut(flat: Flat, index: int, count: int) -> Chosen:
    """Return part ``index`` of ``count`` of a state that this rank holds whole, cut evenly by bytes, between rows."""
    sizes = [held.entry.size_bytes for held in flat.held]
    start, stop = bounds(sum(sizes), count)[index]
    chosen, begin = [], 0
    for held, size in zip(flat.held, sizes, strict=True):
        first, last = (_at_row(held.entry, end - begin) for end in (start, stop))
        if first < last or (not size and not index):
            chosen.append((held, Extent(first, last)))
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
        lowest |= {name: other for name, extent in (holding or whole(sizes_of(shapes))).items() if extent.elements}
    first_whole = next((other for other, holding in enumerate(holdings) if holding is None), None)
    chosen: Chosen = []
    for held in flat.held:
        entry = held.entry
        if entry.divided:
            chosen += [(held, extent) for extent in writes(rank, entry.of)]
            continue
        writer = lowest.get(entry.of, first_whole or 0) if entry.of else 0
        if first_whole is not None and entry.of and entry.of not in shapes:  # a buffer, which whole ranks do not list
            writer = min(writer, first_whole)
        if writer == rank:
            chosen.append((held, entry.whole))
    return chosen


def writers(
    holdings: Sequence[Holding | None], shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[int, str], list[Extent]]:
    """Return a function of rank and parameter: the elements that the rank writes, such that all write as much."""
    sizes = sizes_of(shapes)
    everything = whole(sizes)
    parameters = [
        everything if holding is None else {name: extent for name, extent in holding.items() if name in sizes}
        for holding in holdings
    ]
    by_owners: dict[tuple[int, ...], list[tuple[str, Extent]]] = {}
    for piece in pieces_of(sizes, parameters):
        by_owners.setdefault(piece.owners, []).append((piece.name, piece.extent))
    sizes_by_owners = ((sum(extent.elements for _, extent in pieces), owners) for owners, pieces in by_owners.items())
    amounts = shared(list(sizes_by_owners))
    found: dict[tuple[int, str], list[Extent]] = {}
    for given, pieces in zip(amounts, by_owners.values(), strict=True):
        begin = 0  # of the piece, among all elements with these owners
        for name, extent in pieces:
            start, row = 0, row_elements(shapes[name])
            for rank in sorted(given):
                stop = start + given[rank]
                first, last = (_row_in(extent, end - begin, row) for end in (start, stop))
                if first < last:
                    found.setdefault((rank, name), []).append(Extent(first, last))
                start = stop
            begin += extent.elements
    return lambda rank, name: found.get((rank, name), [])


def spans_of(chosen: Chosen) -> list[Span]:
    """Return the contents of a part."""
    return [
        Span(held.entry.name, str(held.entry.dtype).removeprefix("torch."), held.entry.shape, extent.start, extent.stop)
        for held, extent in chosen
    ]


def packed(chosen: Chosen, into: torch.Tensor | None) -> torch.Tensor:
    """Copy a part's data to host memory; ``into`` is reused if it has the right length."""
    ranges = []
    for number, (held, extent) in enumerate(chosen):
        size = held.entry.dtype.itemsize
        ranges.append(ByteRange(number, extent.start * size - held.start_byte, extent.stop * size - held.start_byte))
    return pack([held.values for held, _ in chosen], ranges, into)


def size_bytes(chosen: Chosen) -> int:
    """Return the size of a part's data."""
    return sum(extent.elements * held.entry.dtype.itemsize for held, extent in chosen)


def places(spans: Sequence[Span], *, header_bytes: int) -> Iterator[tuple[Span, int]]:
    """Yield each span with the place of its first byte in the file."""
    reached = header_bytes
    for span in spans:
        yield span, reached
        reached += span.size_bytes


def _row_in(extent: Extent, elements: int, row: int) -> int:
    """Return the element of ``extent`` at which it is cut after some elements: the start of a row, or an end."""
    if elements <= 0:
        return extent.start
    if elements >= extent.elements:
        return extent.stop
    return max(extent.start, (extent.start + elements) // row * row)


def _at_row(entry: Entry, byte: int) -> int:
    """Return the element at which a tensor is cut, at or before one of its bytes; both ends for bytes outside."""
    if byte <= 0:
        return 0
    if byte >= entry.size_bytes:
        return entry.elements
    row = row_elements(entry.shape)
    if row * entry.dtype.itemsize > LARGEST_ROW_BYTES:
        row = 1
    return byte // entry.dtype.itemsize // row * row
