"""Shares and room for state together: a multiple-choice knapsack, solved exactly, with its linear bound.

Each device picks one entry of its menu: it takes up to ``samples`` and keeps ``room`` bytes for the training state.
Wanted are picks that together take the batch and keep the most room. Devices of one kind have one menu.

Legend: ``X`` samples that are still to be taken, from 0 to the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMenu:
    """What each of some equal devices can do within a step time.

    Attributes:
        devices: that pick from it, at least 1.
        entries: (samples, room in bytes), by growing samples and falling room, at least one; see ``menu``.
    """

    devices: int
    entries: tuple[tuple[int, float], ...]


def menu(devices: int, entries: Sequence[tuple[int, float]]) -> DeviceMenu:
    """Return the entries that no other entry beats, in order."""
    kept: list[tuple[int, float]] = []
    for samples, room in sorted(entries, key=lambda entry: (-entry[0], -entry[1])):
        if not kept or room > kept[-1][1]:
            kept.append((samples, room))
    return DeviceMenu(devices=devices, entries=tuple(reversed(kept)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomBounds:
    """Limits of the most room, from the linear relaxation.

    Attributes:
        at_most: no picks keep more; negative infinity where the batch cannot be taken.
        at_least: some picks keep as much; ``picks`` are those.
        picks: index of the entry for each device, menu by menu; empty where the batch cannot be taken.
    """

    at_most: float
    at_least: float
    picks: tuple[tuple[int, ...], ...]


_NONE = RoomBounds(at_most=-np.inf, at_least=-np.inf, picks=())


def room_bounds(menus: Sequence[DeviceMenu], batch_samples: int) -> RoomBounds:
    """Return bounds of the most room, at most one device's entry apart.

    On the upper concave hull of each menu, further samples cost ever more room. So the cheapest pieces of all hulls,
    in order, solve the relaxation; only the last piece is taken in part, and taking it whole is a solution.
    """
    hulls = [_hull(one.entries) for one in menus]
    left = batch_samples - sum(one.devices * one.entries[hull[0]][0] for one, hull in zip(menus, hulls, strict=True))
    room = sum(one.devices * one.entries[hull[0]][1] for one, hull in zip(menus, hulls, strict=True))
    picks = [[hull[0]] * one.devices for one, hull in zip(menus, hulls, strict=True)]
    if left <= 0:
        return RoomBounds(at_most=room, at_least=room, picks=tuple(map(tuple, picks)))
    pieces = []
    for index, (one, hull) in enumerate(zip(menus, hulls, strict=True)):
        for start, end in itertools.pairwise(hull):
            (b0, r0), (b1, r1) = one.entries[start], one.entries[end]
            pieces.append(((r0 - r1) / (b1 - b0), index, end, b1 - b0, r0 - r1))
    pieces.sort(key=lambda piece: (piece[0], piece[1], piece[2]))
    for slope, index, end, samples, loss in pieces:
        whole = min(menus[index].devices, -(-left // samples))
        picks[index][:whole] = [end] * whole
        if whole * samples >= left:
            at_most = room - slope * left
            return RoomBounds(at_most=at_most, at_least=room - whole * loss, picks=tuple(map(tuple, picks)))
        left -= whole * samples
        room -= whole * loss
    return _NONE


def most_room(menus: Sequence[DeviceMenu], batch_samples: int) -> tuple[float, tuple[tuple[int, ...], ...]] | None:
    """Return the most room and the picks that keep it, ``None`` where the batch cannot be taken.

    Exact. V(x) is the most room of some devices that together take at least x samples; one device more gives
    ``V'(x) = max over its entries (b, r) of V(max(0, x − b)) + r``. That takes devices · entries · batch operations.
    """
    best_X: NDArray[np.float64] = np.full(batch_samples + 1, -np.inf)
    best_X[0] = 0.0
    chosen: list[tuple[int, NDArray[np.int16]]] = []
    for index, one in enumerate(menus):
        for _ in range(one.devices):
            best_X, pick_X = _add(best_X, one.entries)
            chosen.append((index, pick_X))
    if best_X[batch_samples] == -np.inf:
        return None
    picks: list[list[int]] = [[] for _ in menus]
    left = batch_samples
    for index, pick_X in reversed(chosen):
        pick = int(pick_X[left])
        picks[index].append(pick)
        left = max(0, left - menus[index].entries[pick][0])
    return float(best_X[batch_samples]), tuple(map(tuple, picks))


def _add(
    best_X: NDArray[np.float64], entries: Sequence[tuple[int, float]]
) -> tuple[NDArray[np.float64], NDArray[np.int16]]:
    """Return the table with one device more, and which entry that device picks."""
    size = len(best_X)
    new_X = np.full(size, -np.inf)
    pick_X = np.zeros(size, dtype=np.int16)
    for number, (samples, room) in enumerate(entries):
        with_X = np.empty(size)
        reach = min(samples, size - 1)
        with_X[: reach + 1] = best_X[0] + room
        with_X[reach:] = best_X[: size - reach] + room
        better = with_X > new_X
        new_X[better] = with_X[better]
        pick_X[better] = number
    return new_X, pick_X


def _hull(entries: Sequence[tuple[int, float]]) -> list[int]:
    """Return the indices of the upper concave hull of a menu."""
    hull: list[int] = []
    for index, (samples, room) in enumerate(entries):
        while len(hull) > 1:
            (b0, r0), (b1, r1) = entries[hull[-2]], entries[hull[-1]]
            if (r1 - r0) * (samples - b0) > (room - r0) * (b1 - b0):
                break
            hull.pop()
        hull.append(index)
    return hull
