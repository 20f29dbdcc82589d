"""The loads of a transfer: the ranges of a state that ranks lack, and the ranks that can send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from heterotrain.errors import HeterotrainError
from heterotrain.state.holdings import Extent, Holding
from heterotrain.state.routes import Load
from heterotrain.state.tensors import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What one rank has and needs of parameters and buffers by name; ``None`` for everything.

    Attributes:
        has: what it holds of the newest state.
        needs: what its model consists of.
        is_donor: whether it has the newest state, of which ``has`` is a part. Others have nothing of it.
    """

    has: Holding | None = None
    needs: Holding | None = None
    is_donor: bool = True


EntryBytes = tuple[Entry, Extent]
"""Bytes of an entry of the state."""


def extent_in(entry: Entry, holding: Holding | None) -> Extent | None:
    """Return the elements of an entry in a holding; ``None`` when there are none, and it is not held at all.

    Entries that belong to no parameter are held by all ranks.
    """
    if holding is None or not entry.of:
        return entry.whole
    extent = holding.get(entry.of)
    if extent is None or (not extent.elements and entry.elements):
        return None
    return extent if entry.divided else entry.whole


def loads_of(entries: Sequence[Entry], places: Sequence[Holdings]) -> dict[Load, tuple[EntryBytes, ...]]:
    """Return what has to be sent, each load with its bytes in order.

    Raises:
        HeterotrainError: nobody has something that a rank lacks.
    """
    known: dict[str, list[tuple[Extent, tuple[int, ...], tuple[int, ...]]]] = {}
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[EntryBytes]] = {}
    for entry in entries:
        if not entry.elements:
            continue
        if not entry.divided:
            parts = _refined(entry, places)
        elif entry.of in known:
            parts = known[entry.of]
        else:
            parts = known[entry.of] = _refined(entry, places)
        size = entry.dtype.itemsize
        for extent, donors, receivers in parts:
            if not donors:
                raise HeterotrainError(f"no rank holds {entry.name!r}, elements {extent.start} to {extent.stop}")
            found.setdefault((donors, receivers), []).append((entry, Extent(extent.start * size, extent.stop * size)))
    return {
        Load(sum(bytes_of.elements for _, bytes_of in spans), donors, receivers): tuple(spans)
        for (donors, receivers), spans in found.items()
    }


def _refined(entry: Entry, places: Sequence[Holdings]) -> list[tuple[Extent, tuple[int, ...], tuple[int, ...]]]:
    """Return spans of an entry that some ranks lack, in order, each with its donors and receivers."""
    has = [extent_in(entry, place.has) if place.is_donor else None for place in places]
    needs = [extent_in(entry, place.needs) for place in places]
    edges = sorted({edge for extent in (*has, *needs) if extent is not None for edge in (extent.start, extent.stop)})
    found = []
    for start, stop in pairwise(edges):
        donors = tuple(rank for rank, extent in enumerate(has) if _covers(extent, start, stop))
        receivers = tuple(
            rank for rank, extent in enumerate(needs) if _covers(extent, start, stop) and rank not in donors
        )
        if receivers:
            found.append((Extent(start, stop), donors, receivers))
    return found


def _covers(extent: Extent | None, start: int, stop: int) -> bool:
    return extent is not None and extent.start <= start and stop <= extent.stop


def covering(sizes: Mapping[str, int], held: Mapping[int, Holding | None]) -> tuple[int, ...] | None:
    """Return ranks that hold everything together, lower ones first, none of which is dispensable to those before it.

    Args:
        sizes: elements of all parameters and buffers of the whole model.
        held: what each of some ranks holds.

    Returns:
        The ranks, ascending in the order of ``held``; ``None`` when something is missing.
    """
    chosen: list[int] = []
    gaps: dict[str, list[Extent]] = {name: [Extent(0, size)] for name, size in sizes.items() if size}
    for rank, holding in held.items():
        if holding is None:
            return (*chosen, rank)
        left: dict[str, list[Extent]] = {}
        for name, extents in gaps.items():
            own = holding.get(name)
            remaining = extents if own is None else [part for extent in extents for part in _minus(extent, own)]
            if remaining:
                left[name] = remaining
        if left != gaps:
            chosen.append(rank)
            gaps = left
        if not gaps:
            return tuple(chosen) or (rank,)
    return None


def _minus(extent: Extent, taken: Extent) -> list[Extent]:
    """Return the elements of ``extent`` outside of ``taken``."""
    before = Extent(extent.start, max(extent.start, min(extent.stop, taken.start)))
    after = Extent(min(extent.stop, max(extent.start, taken.stop)), extent.stop)
    return [part for part in (before, after) if part.elements]
