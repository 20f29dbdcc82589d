"""Seconds of the exchange of gradients between members, as the trainer makes it: each piece among its own owners.

A *piece* is a part of the model that the same devices hold, one of each member. Its owners add up its gradient in a
ring of their own, in the order of the members: ``2 (m − 1)`` rounds, in each of which every owner sends an m-th of the
piece to the next one. A round takes as long as its slowest link. Pieces with different owners travel at the same time,
so the exchange ends when the busiest device has finished. A device that has a part in several rings pays their sum.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from heterotrain_planner.layout.problem import Link, Problem
from heterotrain_planner.layout.result import DeviceLayout, HeldUnits
from heterotrain_planner.layout.ring_order import Rings

_ROUNDING = 1e-9
"""Parts of the state whose edges differ by less begin at the same element."""


def owner_bytes(problem: Problem, layouts: Sequence[DeviceLayout]) -> dict[tuple[int, ...], float]:
    """Return the gradient bytes of each set of owners, as the place of the owner in every member, by member."""
    units = len(problem.units)
    parts = {id(layout): layout.held(units) for layout in {id(each): each for each in layouts}.values()}
    cuts = sorted({edge for found in parts.values() for part in found for edge in (part.first, part.end)})
    divisions = _distinct(edge for found in parts.values() for part in found for edge in (part.start, part.stop))
    sizes = [0.0, *itertools.accumulate(float(unit.parameter_bytes) for unit in problem.units)]
    held: dict[tuple[int, ...], float] = defaultdict(float)
    for first, end in itertools.pairwise(cuts):
        for start, stop in itertools.pairwise(divisions):
            middle = (start + stop) / 2
            place = {key: _owner(found, first, middle) for key, found in parts.items()}
            held[tuple(place[id(layout)] for layout in layouts)] += (sizes[end] - sizes[first]) * (stop - start)
    return dict(held)


def exchange_seconds(problem: Problem, layouts: Sequence[DeviceLayout]) -> float:
    """Return the seconds of the exchange between members in this order, none of it hidden."""
    rings, order = _rings(problem, layouts)
    return rings.seconds(order)


def shortest_exchange(problem: Problem, layouts: Sequence[DeviceLayout]) -> tuple[float, tuple[int, ...]]:
    """Return the least seconds of the exchange over all orders of the members, as far as they are tried, and an order.

    The order is theirs by index; the given one where it is as good.
    """
    rings, types = _rings(problem, layouts)
    seconds, order = rings.shortest(types)
    if order == types:
        return seconds, tuple(range(len(layouts)))
    members = defaultdict(list)
    for index in reversed(range(len(layouts))):
        members[types[index]].append(index)
    return seconds, tuple(members[each].pop() for each in order)


def _rings(problem: Problem, layouts: Sequence[DeviceLayout]) -> tuple[Rings, tuple[int, ...]]:
    """Return the rings of these members, and the type of each: some hold the same on the same kinds of devices."""
    units = len(problem.units)
    found = {id(each): (each.kinds, each.held(units)) for each in layouts}
    firsts = {found[id(each)]: each for each in layouts}
    number = {held: index for index, held in enumerate(firsts)}
    types = tuple(number[found[id(each)]] for each in layouts)
    counts = [types.count(each) for each in number.values()]
    return Rings(problem, [kinds for kinds, _ in firsts], owner_bytes(problem, list(firsts.values())), counts), types


def least_exchange(problem: Problem) -> float:
    """Return seconds that no exchange falls below: that of the least members on the most devices each."""
    devices = sum(kind.count for kind in problem.kinds) if problem.may_shard else 0
    held = sum(unit.parameter_bytes for unit in problem.units) / max(problem.most_stages, devices)
    links = (problem.default_link, *problem.links.values())
    fastest = Link(bytes_per_s=max(link.bytes_per_s for link in links), latency_s=min(link.latency_s for link in links))
    members = problem.least_members
    return 2 * (members - 1) * fastest.seconds(held / members) if held else 0.0


def rough_exchange(problem: Problem, members: Mapping[tuple[int, ...], int]) -> float:
    """Return about the seconds of the exchange between members whose devices hold equal parts of the model.

    Devices of a kind are next to each other in each member, kinds in one order for all, so that owners of a piece are
    of the same kind where that is possible: that is what the choice of cuts comes to where links differ. Members are in
    the best order.

    Args:
        problem: sound.
        members: their number, by the devices of each kind.
    """
    number = sum(members.values())
    if number <= 1:
        return 0.0
    size = float(sum(unit.parameter_bytes for unit in problem.units))
    groups = [(devices, count) for devices, count in sorted(members.items()) if count]
    held = [_held(devices, groups) for devices, _ in groups]
    pieces: dict[tuple[int, ...], float] = defaultdict(float)
    for start, end in itertools.pairwise(_distinct(edge for own in held for _, edge in own)):
        middle = (start + end) / 2
        owners = tuple(next(place for place, (_, edge) in enumerate(own) if middle < edge) for own in held)
        pieces[owners] += size * (end - start)
    kinds = [[problem.kinds[kind].name for kind, _ in own] for own in held]
    counts = [count for _, count in groups]
    order = [group for group, count in enumerate(counts) for _ in range(count)]
    return Rings(problem, kinds, pieces, counts).shortest(order)[0]


def _held(devices: tuple[int, ...], groups: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[int, float]]:
    """Return the kind of each device of a member, and where its part of the model ends.

    Members with the same kinds hold the same part with each kind, so that its devices exchange among themselves.
    """
    alike = [(own, count) for own, count in groups if [bool(each) for each in own] == [bool(each) for each in devices]]
    weight = sum(count for _, count in alike)
    edge, found = 0.0, []
    for kind, number in enumerate(devices):
        part = sum(count * own[kind] / sum(own) for own, count in alike) / weight
        found += [(kind, edge + part * (place + 1) / number) for place in range(number)]
        edge += part
    return found


def _owner(parts: Sequence[HeldUnits], unit: int, place: float) -> int:
    return next(
        index
        for index, part in enumerate(parts)
        if part.first <= unit < part.end and part.start - _ROUNDING <= place <= part.stop + _ROUNDING
    )


def _distinct(edges: Iterable[float]) -> list[float]:
    """Return growing edges without those that differ by rounding only; the first is 0 and the last is 1."""
    found = [0.0]
    for edge in sorted(edges):
        if edge > found[-1] + _ROUNDING:
            found.append(edge)
    found[-1] = 1.0
    return found
