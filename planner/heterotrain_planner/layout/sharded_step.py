"""The shortest pass of one sharded member for a given largest shard: who computes how much, beside how much state.

State is divisible, so it matters only through the room that activations leave: shares are possible when all rooms
together hold the state. No device may hold more than the largest shard, so further room does not count.

Legend: ``M`` sizes of a micro-batch from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heterotrain_planner.layout.pass_time import DeviceTimes, Gathers

Floats = NDArray[np.float64]

SLACK = 1e-12
"""Part of the state that rounding errors of a sum of rooms may lack."""
_MOST_TABLES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualDevices:
    """The devices of one kind in the member.

    Attributes:
        count: at least 1.
        room_bytes: memory for state and activations.
        times: of one device.
    """

    count: int
    room_bytes: float
    times: DeviceTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every device does.

    Attributes:
        seconds: of the slowest one.
        sizes: samples of each device, by kind.
    """

    seconds: float
    sizes: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class ShardedStep:
    """The search of one member, with the tables that its calls share.

    Attributes:
        devices: by kind.
        ring: collectives of the member.
        activation_bytes: kept for each sample of a micro-batch.
        state_bytes: of the whole training state.
    """

    devices: Sequence[EqualDevices]
    ring: Gathers
    activation_bytes: float
    state_bytes: float
    _times: dict[float, list[Floats]] = field(default_factory=dict)
    _levels: dict[float, Floats] = field(default_factory=dict)

    def times(self, largest_ratio: float) -> list[Floats]:
        """Return the seconds of a pass with its collectives, by kind and size of the micro-batch."""
        if largest_ratio not in self._times:
            if len(self._times) >= _MOST_TABLES:
                self._times.clear()
                self._levels.clear()
            self._times[largest_ratio] = [one.times.overlapped_s(self.ring, largest_ratio) for one in self.devices]
        return self._times[largest_ratio]

    def most_samples(self, one: EqualDevices) -> int:
        """Return the largest micro-batch that fits beside no state at all; 0 where not even one sample fits."""
        most = len(one.times.compute_M) - 1
        if one.room_bytes < self.activation_bytes:
            return 0
        return most if self.activation_bytes <= 0 else min(most, int(one.room_bytes // self.activation_bytes))

    def each_pass(self, samples: int, *, paced_ratio: float, cap_ratio: float) -> Work | None:
        """Return the shortest pass over so many samples, one micro-batch of a size of its own for each device.

        Exact by bisection over the finitely many times of a micro-batch. Each sample beyond those that leave the cap
        untouched costs the same room on every device, so room is a concave function of a kind's samples, and the
        cheapest samples in order keep the most.

        Args:
            samples: of the pass, at least 1.
            paced_ratio: largest shard that collectives wait for.
            cap_ratio: largest shard that a device may hold.
        """
        times = self.times(paced_ratio)
        most = [self.most_samples(one) for one in self.devices]
        if not all(most):
            return None
        if paced_ratio not in self._levels:
            self._levels[paced_ratio] = np.unique(np.concatenate(times))
        levels = self._levels[paced_ratio]
        times = [row[: limit + 1] for row, limit in zip(times, most, strict=True)]

        def totals(level: float) -> list[int] | None:
            limits = [int(np.searchsorted(row, level, side="right")) - 1 for row in times]
            return None if min(limits) < 0 else self._totals(samples, limits, cap_ratio)

        low, high = 0, len(levels) - 1
        if totals(float(levels[high])) is None:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if totals(float(levels[middle])) is not None else (middle + 1, high)
        found = totals(float(levels[high]))
        if found is None:  # cannot be: ``high`` was feasible above or in the loop
            return None
        sizes = tuple(_evenly(total, one.count) for total, one in zip(found, self.devices, strict=True))
        slowest = max(float(row[max(own)]) for row, own in zip(times, sizes, strict=True))
        return Work(seconds=slowest, sizes=sizes)

    def _totals(self, samples: int, limits: Sequence[int], cap_ratio: float) -> list[int] | None:
        """Return the samples of each kind under limits for one device, ``None`` where the state then has no room."""
        if sum(one.count * limit for one, limit in zip(self.devices, limits, strict=True)) < samples:
            return None
        cap, price = cap_ratio * self.state_bytes, self.activation_bytes
        free, room, kinks = [], 0.0, []
        for index, (one, limit) in enumerate(zip(self.devices, limits, strict=True)):
            base = min(cap, one.room_bytes - price)
            whole = limit
            if price > 0 and base == cap:
                whole = min(limit, max(1, int((one.room_bytes - cap) / price)))
            elif price > 0:
                whole = 1
            free.append(one.count * whole)
            room += one.count * base
            if whole < limit:
                lost = base - (one.room_bytes - price * (whole + 1))
                kinks.append((min(price, max(0.0, lost)), index))
        left = samples - sum(free)
        for lost, index in sorted(kinks):
            taken = max(0, min(left, self.devices[index].count))
            free[index] += taken
            room -= taken * lost
            left -= taken
        room -= max(0, left) * price
        if room < self.state_bytes * (1 - SLACK):
            return None
        return _adjusted(free, left, [one.count * limit for one, limit in zip(self.devices, limits, strict=True)])


def _evenly(total: int, number: int) -> tuple[int, ...]:
    """Return whole parts that differ by one at most, larger ones first."""
    part, more = divmod(total, number)
    return (part + 1,) * more + (part,) * (number - more)


def _adjusted(free: list[int], left: int, limits: Sequence[int]) -> list[int]:
    """Return samples by kind with ``left`` more of them, or fewer where it is negative, within limits."""
    for index, limit in enumerate(limits):
        change = min(left, limit - free[index]) if left > 0 else max(left, -free[index])
        free[index] += change
        left -= change
    return free
