"""From one layout to another: which device takes which place, what has to move, and whether that pays.

A device keeps what it holds. Each place goes to a device of its kind, so that the fewest bytes move in total. What a
device lacks comes from all devices that hold it, each sending an equal part.

Legend: ``D`` devices, ``P`` places (stages or shards of the new members), ``X`` cells: runs of units times parts of
their rows, between which no holding begins or ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterotrain_planner.layout.assignment import assign
from heterotrain_planner.layout.costs import Floats
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import DeviceLayout, HeldUnits, NoLayout

Flags = NDArray[np.bool_]

MOST_HOLDERS = 2048
"""Devices, and places, of one transition."""
MOST_ASSIGNED = 256
"""Places of one kind up to which the assignment is exact."""
MOST_CELLS = 4096
"""Cells of one transition."""
LEAST_GAIN = 0.03
"""Gain in speed that a change has to promise beyond its pause: predictions are no more exact, and changes are risks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A living device and the training state in its memory.

    Attributes:
        device: unique name.
        kind: name of its kind.
        parts: what it holds; nothing for a new device.
    """

    device: str
    kind: str
    parts: tuple[HeldUnits, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change of layouts.

    Attributes:
        places: by new member, and by its stage or shard, the device that takes it.
        moved_bytes: received by each device; those that receive nothing are left out.
        lost_bytes: state that no living device holds, so that the newest checkpoint has to be read.
        pause_s: until every device has what it needs; without the reading of a checkpoint.
        reason: one sentence for people.
    """

    places: tuple[tuple[str, ...], ...]
    moved_bytes: Mapping[str, int]
    lost_bytes: int
    pause_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveVerdict:
    """Whether a change pays.

    Attributes:
        pays: whether it does.
        payback_s: seconds after which the new layout has made up for the pause; infinite where it never does.
        reason: one sentence for people.
    """

    pays: bool
    payback_s: float
    reason: str


def transition(
    problem: Problem, holders: Sequence[Holder], layouts: Sequence[DeviceLayout], *, restart_s: float = 0.0
) -> Transition | NoLayout:
    """Return the cheapest way from what the devices hold to new members.

    Args:
        problem: sizes of units, and links by kind.
        holders: all devices that may be used.
        layouts: of the new members.
        restart_s: seconds that any change takes, without the transfers.
    """
    places = [
        (index, kind, (part,))
        for index, layout in enumerate(layouts)
        for kind, part in zip(layout.kinds, layout.held(len(problem.units)), strict=True)
    ]
    if problem_with := _unusable(problem, holders, [kind for _, kind, _ in places]):
        return NoLayout(reason=problem_with)
    cells = _Cells(problem, [*(holder.parts for holder in holders), *(parts for *_, parts in places)])
    if cells.number > MOST_CELLS:
        return NoLayout(reason=f"the layouts cut the state into {cells.number} cells, more than {MOST_CELLS}")
    held_DX = np.array([cells.flags(holder.parts) for holder in holders])
    wanted_PX = np.array([cells.flags(parts) for *_, parts in places])
    device_P = _devices_for(holders, [kind for _, kind, _ in places], held_DX, wanted_PX, cells.bytes_X)
    missing_PX = wanted_PX & ~held_DX[device_P]
    owners_X = held_DX.sum(axis=0)
    needed_X = wanted_PX.any(axis=0)
    lost = float(cells.bytes_X[needed_X & (owners_X == 0)].sum())
    moved_P = (missing_PX & (owners_X > 0)) @ cells.bytes_X
    pause_s = restart_s + _transfer_seconds(problem, holders, device_P, missing_PX, (held_DX, cells.bytes_X))
    moved = {
        holders[device].device: round(size) for device, size in zip(device_P, moved_P.tolist(), strict=True) if size
    }
    named: list[list[str]] = [[] for _ in layouts]
    for (index, *_), device in zip(places, device_P, strict=True):
        named[index].append(holders[device].device)
    lacking = f", and {lost:.3g} bytes come from the newest checkpoint" if lost else ""
    size = sum(moved.values())
    return Transition(
        places=tuple(tuple(each) for each in named),
        moved_bytes=moved,
        lost_bytes=round(lost),
        pause_s=pause_s,
        reason=f"{len(moved)} of {len(places)} devices receive {size:.3g} bytes in {pause_s:.3g} s{lacking}",
    )


def pays(
    *, current_step_s: float | None, new_step_s: float, pause_s: float, dwell_s: float, least_gain: float = LEAST_GAIN
) -> MoveVerdict:
    """Return whether a change gains more than its pause costs while the devices stay as they are.

    In ``dwell_s`` seconds, the old layout makes ``dwell / current`` steps and the new one ``(dwell − pause) / new``.

    Args:
        current_step_s: of the layout in use; ``None`` where it cannot go on.
        new_step_s: predicted for the new layout.
        pause_s: of the change.
        dwell_s: seconds until devices are expected to come or go.
        least_gain: least relative gain in speed.
    """
    if current_step_s is None:
        return MoveVerdict(pays=True, payback_s=0.0, reason="the current layout cannot go on")
    gain = current_step_s / new_step_s - 1
    if gain <= least_gain:
        payback_s = math.inf if gain <= 0 else pause_s * (1 + gain) / gain
        text = f"a gain in speed of {gain:.1%} is not above {least_gain:.0%}"
        return MoveVerdict(pays=False, payback_s=payback_s, reason=text)
    payback_s = pause_s * (1 + gain) / gain
    worth = payback_s < dwell_s
    relation = "less" if worth else "not less"
    return MoveVerdict(
        pays=worth,
        payback_s=payback_s,
        reason=f"{gain:.1%} more speed makes up for a pause of {pause_s:.3g} s in {payback_s:.3g} s, which is "
        f"{relation} than the {dwell_s:.3g} s until devices are expected to change",
    )


def _unusable(problem: Problem, holders: Sequence[Holder], kinds: Sequence[str]) -> str | None:
    """Return in one sentence why there is no transition."""
    if max(len(holders), len(kinds)) > MOST_HOLDERS:
        return f"there are more than {MOST_HOLDERS} devices"
    if not kinds:
        return "there is no new member"
    if len({holder.device for holder in holders}) < len(holders):
        return "a device is listed twice"
    for kind in sorted(set(kinds)):
        have, need = sum(holder.kind == kind for holder in holders), kinds.count(kind)
        if have < need:
            return f"the new members need {need} devices of kind {kind}, and there are {have}"
    for holder in holders:
        for part in holder.parts:
            if not 0 <= part.first < part.end <= len(problem.units) or not 0 <= part.start <= part.stop <= 1:
                return f"{holder.device} holds {part}, which is not a part of this model"
    return None


class _Cells:
    """The model's state cut at every border of any holding."""

    def __init__(self, problem: Problem, holdings: Sequence[Sequence[HeldUnits]]) -> None:
        parts = [part for holding in holdings for part in holding]
        self._unit_edges = sorted({edge for part in parts for edge in (part.first, part.end)})
        self._row_edges = sorted({edge for part in parts for edge in (part.start, part.stop)})
        sizes = [unit.parameter_bytes * problem.state_ratio for unit in problem.units]
        before = np.concatenate([[0.0], np.cumsum(sizes)])
        run_bytes = np.diff(before[self._unit_edges])
        self.bytes_X: Floats = np.outer(run_bytes, np.diff(self._row_edges)).ravel()
        self.number = len(self.bytes_X)

    def flags(self, parts: Sequence[HeldUnits]) -> Flags:
        """Return which cells these parts contain."""
        units, rows = np.array(self._unit_edges[:-1]), np.array(self._row_edges[:-1])
        found = np.zeros((len(units), len(rows)), dtype=bool)
        for part in parts:
            inside = (units >= part.first) & (units < part.end)
            found |= np.outer(inside, (rows >= part.start) & (rows < part.stop))
        return found.ravel()


def _devices_for(
    holders: Sequence[Holder], kinds: Sequence[str], held_DX: Flags, wanted_PX: Flags, bytes_X: Floats
) -> list[int]:
    """Return the device for each place: the fewest bytes move in total.

    A device that holds just what a place wants takes it. That is never worse: let d hold S and take S2, while d2 takes
    S. Exchanged, d moves nothing, and d2 lacks at most what it lacked of S, and of S2 what S lacks.
    """
    found = [-1] * len(kinds)
    for kind in sorted(set(kinds)):
        free = [index for index, holder in enumerate(holders) if holder.kind == kind]
        open_ = []
        by_content: dict[bytes, list[int]] = {}
        for index in free:
            by_content.setdefault(held_DX[index].tobytes(), []).append(index)
        for place in [index for index, each in enumerate(kinds) if each == kind]:
            same = by_content.get(wanted_PX[place].tobytes())
            if same:
                found[place] = same.pop(0)
                free.remove(found[place])
            else:
                open_.append(place)
        if open_:
            wanted = wanted_PX[open_] * bytes_X
            cost = wanted.sum(axis=1)[:, None] - wanted @ held_DX[free].T
            chosen = assign(cost) if len(open_) <= MOST_ASSIGNED else _greedy(cost)
            for place, device in zip(open_, chosen, strict=True):
                found[place] = free[device]
    return found


def _greedy(cost_PD: Floats) -> list[int]:
    """Return a device for each place, each in turn the cheapest that is left."""
    cost = cost_PD.copy()
    found = []
    for place in range(len(cost)):
        found.append(int(np.argmin(cost[place])))
        cost[:, found[-1]] = np.inf
    return found


def _transfer_seconds(
    problem: Problem,
    holders: Sequence[Holder],
    device_P: Sequence[int],
    missing_PX: Flags,
    held: tuple[Flags, Floats],
) -> float:
    """Return the seconds of the busiest direction of any device: receivers and senders work at the same time."""
    held_DX, bytes_X = held
    names = sorted({holder.kind for holder in holders})
    number = {name: index for index, name in enumerate(names)}
    kind_D = np.array([number[holder.kind] for holder in holders])
    owners_X = np.maximum(held_DX.sum(axis=0), 1)
    # Bytes of each cell that one owner sends to one receiver.
    part_X = bytes_X / owners_X
    per_byte = np.array([[1.0 / problem.link(a, b).bytes_per_s for b in names] for a in names])
    latency = max(problem.link(a, b).latency_s for a in names for b in names)
    owners_by_kind = np.array([held_DX[kind_D == kind].sum(axis=0) for kind in range(len(names))])
    receiver_P = kind_D[list(device_P)]
    receive_P = np.einsum("px,kx,pk->p", missing_PX * part_X, owners_by_kind, per_byte[receiver_P], optimize=True)
    receivers_by_kind = np.array([missing_PX[receiver_P == kind].sum(axis=0) for kind in range(len(names))])
    send_D = np.einsum("dx,kx,dk->d", held_DX * part_X, receivers_by_kind, per_byte[kind_D], optimize=True)
    if not receive_P.any():
        return 0.0
    return latency + float(max(receive_P.max(), send_D.max()))
