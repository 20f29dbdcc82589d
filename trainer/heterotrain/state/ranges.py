"""Ranges of tensors, and the ranks that hold them. Pure: the same on every rank.

A rank holds one contiguous range of each parameter's elements, counted in the flattened whole parameter. A replicated
rank holds everything, a rank of a sharded member some rows of each parameter, and a stage of a pipeline some whole
parameters. The common refinement of all ranks' ranges gives the *pieces*: all elements of a piece have the same owners,
and the owners of a piece add up its gradient among themselves.

A layout that cuts another dimension than the first one holds no such range; it would add the dimension here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True, order=True)
class TensorRange:
    """Elements ``[start, stop)`` of a named tensor, flattened; empty when both are equal. Bytes where it is said."""

    name: str
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def has(self, other: TensorRange) -> bool:
        """Return whether all elements of another range of the tensor are in this one."""
        return self.start <= other.start and other.stop <= self.stop

    def common(self, other: TensorRange) -> TensorRange | None:
        """Return the elements in both ranges of one tensor; ``None`` when there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return TensorRange(self.name, start, stop) if start < stop else None

    def without(self, other: TensorRange) -> tuple[TensorRange, ...]:
        """Return the elements outside of another range of the tensor."""
        edges = ((self.start, min(self.stop, other.start)), (max(self.start, other.stop), self.stop))
        return tuple(TensorRange(self.name, start, stop) for start, stop in edges if start < stop)


@dataclass(frozen=True, slots=True, order=True)
class OwnedRange(TensorRange):
    """A range of which all elements are held by the same ranks of the formation: ``owners``, ascending."""

    owners: tuple[int, ...]


Holding = Mapping[str, TensorRange]
"""What one rank holds, by the parameter's name; a parameter that is absent is not held at all."""
Gaps = Mapping[str, tuple[TensorRange, ...]]
"""Ranges that are missing, by the parameter's name, in order."""


def whole(sizes: Mapping[str, int]) -> dict[str, TensorRange]:
    """Return the holding of a rank that holds every parameter. ``sizes`` are elements by parameter name."""
    return {name: TensorRange(name, 0, size) for name, size in sizes.items()}


def refined(name: str, held: Sequence[TensorRange | None]) -> list[OwnedRange]:
    """Return the longest ranges of a tensor that have the same owners, in order.

    Args:
        name: the tensor's name.
        held: what each rank holds of it.
    """
    own = [(rank, each) for rank, each in enumerate(held) if each is not None and each.elements]
    found: list[OwnedRange] = []
    for start, stop in pairwise(sorted({edge for _, each in own for edge in (each.start, each.stop)})):
        owners = tuple(rank for rank, each in own if each.start <= start and stop <= each.stop)
        if found and found[-1].stop == start and found[-1].owners == owners:
            found[-1] = replace(found[-1], stop=stop)
        elif owners:
            found.append(OwnedRange(name, start, stop, owners))
    return found


def pieces_of(sizes: Mapping[str, int], holdings: Sequence[Holding]) -> tuple[OwnedRange, ...]:
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
        for name, own in holding.items():
            if not 0 <= own.start <= own.stop <= sizes.get(name, -1):
                raise ValueError(
                    f"rank {rank} holds [{own.start}, {own.stop}) of {name!r}, which has {sizes.get(name, 0)} elements"
                )
    return tuple(piece for name in sizes for piece in refined(name, [holding.get(name) for holding in holdings]))


def missing(sizes: Mapping[str, int], holdings: Iterable[Holding]) -> Gaps:
    """Return the elements that no rank holds; empty when the ranks hold the whole model together.

    Args:
        sizes: elements of every parameter of the whole model.
        holdings: of some ranks, for example those of one member.
    """
    gaps: Gaps = {name: (every,) for name, every in whole(sizes).items() if every.elements}
    for holding in holdings:
        gaps = _without(gaps, holding)
    return gaps


def covering(sizes: Mapping[str, int], held: Mapping[int, Holding | None]) -> tuple[int, ...] | None:
    """Return ranks that hold everything together, lower ones first, none of which is dispensable to those before it.

    Args:
        sizes: elements of all parameters and buffers of the whole model.
        held: what each of some ranks holds; ``None`` for everything.

    Returns:
        The ranks, ascending in the order of ``held``; ``None`` when something is missing.
    """
    chosen: tuple[int, ...] = ()
    gaps = missing(sizes, ())
    for rank, holding in held.items():
        left = {} if holding is None else _without(gaps, holding)
        if left != gaps or holding is None:
            chosen, gaps = (*chosen, rank), left
        if not gaps:
            return chosen or (rank,)
    return None


def between(ranges: Iterable[TensorRange], start: int, stop: int) -> tuple[TensorRange, ...]:
    """Return what lies in ``[start, stop)`` of ranges that follow one another."""
    found, reached = [], 0
    for each in ranges:
        first, last = max(start - reached, 0), min(stop - reached, each.elements)
        if first < last:
            found.append(TensorRange(each.name, each.start + first, each.start + last))
        reached += each.elements
    return tuple(found)


def _without(gaps: Gaps, holding: Holding) -> Gaps:
    left = {}
    for name, ranges in gaps.items():
        own = holding.get(name)
        rest = ranges if own is None else tuple(part for each in ranges for part in each.without(own))
        if rest:
            left[name] = rest
    return left
