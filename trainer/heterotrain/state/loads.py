"""The loads of a transfer: the ranges of a state that ranks lack, and the ranks that can send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain.errors import HeterotrainError
from heterotrain.state.ranges import Holding, OwnedRange, TensorRange, refined
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


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes that all ``receivers`` lack and all ``donors`` have; at least one of each, and none is both.

    Attributes:
        ranges: bytes of entries of the state, one after the other.
    """

    ranges: tuple[TensorRange, ...]
    donors: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Length of all ranges."""
        return sum(each.elements for each in self.ranges)

    @property
    def is_relayed(self) -> bool:
        """Whether receivers pass parts on to each other, because donors would have to send more than the load."""
        return len(self.receivers) > len(self.donors)


def range_in(entry: Entry, holding: Holding | None) -> TensorRange | None:
    """Return the elements of an entry in a holding; ``None`` when there are none, and it is not held at all.

    Entries that belong to no parameter are held by all ranks.
    """
    if holding is None or not entry.of:
        return entry.whole
    own = holding.get(entry.of)
    if own is None or (not own.elements and entry.elements):
        return None
    return TensorRange(entry.name, own.start, own.stop) if entry.divided else entry.whole


def loads_of(entries: Sequence[Entry], places: Sequence[Holdings]) -> list[Load]:
    """Return what has to be sent.

    Raises:
        HeterotrainError: nobody has something that a rank lacks.
    """
    known: dict[tuple[bool, str], list[OwnedRange]] = {}
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[TensorRange]] = {}
    for entry in entries:
        if not entry.elements:
            continue
        key = (entry.divided, entry.of if entry.divided else entry.name)  # moments are held like their parameter
        if key not in known:
            has = [range_in(entry, place.has) if place.is_donor else None for place in places]
            known[key] = refined(entry.name, [*has, *(range_in(entry, place.needs) for place in places)])
        size = entry.dtype.itemsize
        for each in known[key]:
            donors = tuple(rank for rank in each.owners if rank < len(places))
            needing = [rank - len(places) for rank in each.owners if rank >= len(places)]
            receivers = tuple(rank for rank in needing if rank not in donors)
            if receivers and not donors:
                raise HeterotrainError(f"no rank holds {entry.name!r}, elements {each.start} to {each.stop}")
            if receivers:
                of_bytes = TensorRange(entry.name, each.start * size, each.stop * size)
                found.setdefault((donors, receivers), []).append(of_bytes)
    return [Load(tuple(ranges), donors, receivers) for (donors, receivers), ranges in found.items()]
