"""Assigns elements of the model's parameters to ranks. Pure: the same on every rank.

A rank holds one contiguous range of each parameter's elements, counted in the flattened whole parameter. A replicated
rank holds everything, a rank of a sharded member some rows of each parameter, and a stage of a pipeline some whole
parameters. The common refinement of all ranks' ranges gives the *pieces*: all elements of a piece have the same owners,
and the owners of a piece add up its gradient among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Elements ``[start, stop)`` of a flattened parameter; empty when both are equal."""

    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


Holding = Mapping[str, Extent]
"""What one rank holds: an extent for each parameter name; a parameter that is absent is not held at all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of one parameter that are held by the same ranks.

    Attributes:
        name: the parameter's name in the whole model.
        start: first element.
        stop: the element after the last one.
        owners: all ranks in the formation that hold these elements, ascending; at least one.
    """

    name: str
    start: int
    stop: int
    owners: tuple[int, ...]

    @property
    def extent(self) -> Extent:
        """The elements."""
        return Extent(self.start, self.stop)


def whole(sizes: Mapping[str, int]) -> dict[str, Extent]:
    """Return the holding of a rank that holds every parameter. ``sizes`` are elements by parameter name."""
    return {name: Extent(0, size) for name, size in sizes.items()}


def pieces_of(sizes: Mapping[str, int], holdings: Sequence[Holding]) -> tuple[Piece, ...]:
    """Return the common refinement of all holdings.

    Pieces follow the order of ``sizes``, and inside a parameter that of its elements. Elements that nobody holds are in
    no piece (``missing``).

    Args:
        sizes: elements of every parameter of the whole model, in the model's order.
        holdings: by rank in the formation.

    Raises:
        ValueError: a holding names an unknown parameter, or elements outside of it.
    """
    for rank, holding in enumerate(holdings):
        for name, extent in holding.items():
            if not 0 <= extent.start <= extent.stop <= sizes.get(name, -1):
                raise ValueError(
                    f"rank {rank} holds [{extent.start}, {extent.stop}) of {name!r}, which has {sizes.get(name, 0)} "
                    "elements"
                )
    found: list[Piece] = []
    for name in sizes:
        held = [(rank, holding[name]) for rank, holding in enumerate(holdings) if name in holding]
        held = [(rank, extent) for rank, extent in held if extent.elements]
        edges = sorted({edge for _, extent in held for edge in (extent.start, extent.stop)})
        first = len(found)
        for start, stop in pairwise(edges):
            owners = tuple(rank for rank, extent in held if extent.start <= start and stop <= extent.stop)
            if not owners:
                continue
            if len(found) > first and found[-1].stop == start and found[-1].owners == owners:
                found[-1] = Piece(name, found[-1].start, stop, owners)
            else:
                found.append(Piece(name, start, stop, owners))
    return tuple(found)


def missing(sizes: Mapping[str, int], holdings: Iterable[Holding]) -> dict[str, tuple[Extent, ...]]:
    """Return the elements that no rank holds, by parameter; empty when the ranks hold the whole model together.

    Args:
        sizes: elements of every parameter of the whole model.
        holdings: of some ranks, for example those of one member.
    """
    every = list(holdings)
    found = {}
    for name, size in sizes.items():
        gaps, reached = [], 0
        for extent in sorted(holding[name] for holding in every if name in holding):
            if extent.start > reached:
                gaps.append(Extent(reached, extent.start))
            reached = max(reached, extent.stop)
        if reached < size:
            gaps.append(Extent(reached, size))
        if gaps:
            found[name] = tuple(gaps)
    return found


def overlap(one: Extent, other: Extent) -> Extent | None:
    """Return the elements in both extents; ``None`` when there are none."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Extent(start, stop) if start < stop else None
