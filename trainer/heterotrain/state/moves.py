"""The order in which a divided state moves between ranks, so that none of them needs room for both of its parts.

A rank can release what it does not need any more once all ranks have received a batch. Each batch is the one after
which the fullest rank exceeds the larger of its two parts by the fewest bytes. So two ranks that exchange their parts
do so in turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain.state.loads import Holdings, range_in
from heterotrain.state.ranges import TensorRange
from heterotrain.state.tensors import Entry

BATCH_BYTES = 32 << 20
"""Tensors of a batch, unless one parameter with its optimizer state is larger."""
MAX_BATCHES = 256
"""Batches of large states are larger: each one costs a message between all ranks."""

Batch = tuple[Entry, ...]


def releases(places: Sequence[Holdings]) -> bool:
    """Return whether some rank has something that it does not need any more."""
    return any(place.is_donor and place.has != place.needs for place in places)


def batches(entries: Sequence[Entry], places: Sequence[Holdings], batch_bytes: int | None = None) -> tuple[Batch, ...]:
    """Return all entries in the order of their move; those that belong to no parameter come first.

    All entries of a parameter are in the same batch.

    Args:
        entries: of the whole state.
        places: what each rank has and needs.
        batch_bytes: largest size of a batch of more than one parameter; ``None`` for ``BATCH_BYTES``.
    """
    common = tuple(entry for entry in entries if not entry.of)
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.of:
            by_name.setdefault(entry.of, []).append(entry)
    total = sum(entry.size_bytes for entry in entries)
    queues = _queues(list(by_name.values()), places, max(batch_bytes or BATCH_BYTES, total // MAX_BATCHES))
    had = [_part_bytes(entries, place, needed=False) for place in places]
    room = [max(size, _part_bytes(entries, place, needed=True)) for size, place in zip(had, places, strict=True)]
    ordered = [common] if common else []
    while queues:
        changes = [_changes(queue[0], places) for queue in queues]
        excesses = [
            max(size + received - most for size, (received, _), most in zip(had, change, room, strict=True))
            for change in changes
        ]
        first = min(range(len(queues)), key=lambda number: (excesses[number], _growth(changes[number]), number))
        ordered.append(queues[first].pop(0))
        had = [size + received - left for size, (received, left) in zip(had, changes[first], strict=True)]
        queues = [queue for queue in queues if queue]
    return tuple(ordered)


def _queues(groups: Sequence[Sequence[Entry]], places: Sequence[Holdings], batch_bytes: int) -> list[list[Batch]]:
    """Return batches of parameters that the same ranks have and need."""
    patterns: dict[tuple[object, ...], list[list[Entry]]] = {}
    for group in groups:
        found = patterns.setdefault(_pattern(group[0], places), [[]])
        if found[-1] and sum(entry.size_bytes for entry in (*found[-1], *group)) > batch_bytes:
            found.append([])
        found[-1] += group
    return [[tuple(batch) for batch in found] for found in patterns.values()]


def _pattern(entry: Entry, places: Sequence[Holdings]) -> tuple[object, ...]:
    def share(own: TensorRange | None) -> object:
        return "whole" if own == entry.whole else own and (own.start, own.stop)

    return tuple(
        (place.is_donor and share(range_in(entry, place.has)), share(range_in(entry, place.needs))) for place in places
    )


def _changes(batch: Batch, places: Sequence[Holdings]) -> list[tuple[int, int]]:
    """Return the bytes that each rank receives, and those that it can release afterwards."""
    found = []
    for place in places:
        received = left = 0
        for entry in batch:
            had, needed = _bytes(entry, place, needed=False), _bytes(entry, place, needed=True)
            if place.is_donor and place.has == place.needs:
                continue
            if not had or range_in(entry, place.has) != range_in(entry, place.needs):
                received, left = received + needed, left + had
        found.append((received, left))
    return found


def _growth(changes: Sequence[tuple[int, int]]) -> int:
    return sum(received - left for received, left in changes)


def _part_bytes(entries: Sequence[Entry], place: Holdings, *, needed: bool) -> int:
    return sum(_bytes(entry, place, needed=needed) for entry in entries)


def _bytes(entry: Entry, place: Holdings, *, needed: bool) -> int:
    if not needed and not place.is_donor:
        return 0
    own = range_in(entry, place.needs if needed else place.has)
    return 0 if own is None else own.elements * entry.dtype.itemsize
