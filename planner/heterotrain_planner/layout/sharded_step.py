"""The shortest step of one sharded member for a given largest shard: who computes how much, beside how much state.

State is divisible, so it matters only through the room that activations leave: shares are possible when all rooms
together hold the state. No device may hold more than the largest shard, so further room does not count.

Legend: ``M`` sizes of a micro-batch from 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heterotrain_planner.layout.knapsack import DeviceMenu, menu, most_room, room_bounds
from heterotrain_planner.layout.pass_time import DeviceTimes, Gathers

Floats = NDArray[np.float64]

SLACK = 1e-12
"""Part of the state that rounding errors of a sum of rooms may lack."""
_STEPS_OF_BISECTION = 60
_CLOSE = 1e-6
"""Relative distance of bounds at which bisection ends: the few step times between them are tried exactly."""
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
        picks: (largest micro-batch, samples) of each device, by kind.
    """

    seconds: float
    picks: tuple[tuple[tuple[int, int], ...], ...]


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
        picks = [_evenly(total, one.count) for total, one in zip(found, self.devices, strict=True)]
        slowest = max(float(row[max(sizes)]) for row, sizes in zip(times, picks, strict=True))
        return Work(seconds=slowest, picks=tuple(tuple((size, size) for size in sizes) for sizes in picks))

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

    def once(self, samples: int, *, paced_ratio: float, cap_ratio: float) -> Work | None:
        """Return the shortest step over so many samples where devices differ in the number of micro-batches, too.

        Collectives run once, beside the first forward and the last backward pass. Exact over equal micro-batches: the
        relaxed and the rounded knapsack enclose the least level, and the exact one decides between the few left.
        """
        times = self.times(paced_ratio)
        most = [self.most_samples(one) for one in self.devices]
        if not all(most):
            return None
        cap = cap_ratio * self.state_bytes
        rooms = [
            np.minimum(cap, one.room_bytes - self.activation_bytes * np.arange(1, limit + 1))
            for one, limit in zip(self.devices, most, strict=True)
        ]
        least_room = self.state_bytes * (1 - SLACK)
        if sum(one.count * float(row[0]) for one, row in zip(self.devices, rooms, strict=True)) < least_room:
            return None
        firsts = [row[1 : limit + 1] for row, limit in zip(times, most, strict=True)]
        nexts = [one.times.compute_M[1 : limit + 1] for one, limit in zip(self.devices, most, strict=True)]

        def counts(level: float, index: int) -> NDArray[np.int64]:
            more = np.floor((level - firsts[index]) / nexts[index] + SLACK * samples).astype(np.int64) + 1
            return np.where(firsts[index] <= level, np.minimum(more, samples), 0)

        def menus(level: float) -> list[DeviceMenu] | None:
            found = []
            for index, one in enumerate(self.devices):
                number = counts(level, index)
                size = np.arange(1, len(number) + 1)[number > 0]
                if not len(size):
                    return None
                entries = zip((size * number[number > 0]).tolist(), rooms[index][number > 0].tolist(), strict=True)
                found.append(menu(one.count, tuple(entries)))
            return found

        def relaxed(level: float) -> bool:
            found = menus(level)
            return found is not None and room_bounds(found, samples).at_most >= least_room

        def rounded(level: float) -> bool:
            found = menus(level)
            return found is not None and room_bounds(found, samples).at_least >= least_room

        # With one sample at a time every device could take the whole batch, beside the most room that there is.
        top = max(float(first[0] + samples * more[0]) for first, more in zip(firsts, nexts, strict=True))
        low, _ = _bisect(relaxed, 0.0, top)
        _, high = _bisect(rounded, low, top)
        levels = _between(firsts, nexts, low, high * (1 + _CLOSE), samples)
        first, last = 0, len(levels) - 1
        answer = None
        while first <= last:
            index = (first + last) // 2
            found = menus(levels[index])
            exact = None if found is None else most_room(found, samples)
            if found is not None and exact is not None and exact[0] >= least_room:
                answer, last = (levels[index], found, exact[1]), index - 1
            else:
                first = index + 1
        if answer is None:
            return None
        level, found, chosen = answer
        picks = []
        for index, (one, entries) in enumerate(zip(found, chosen, strict=True)):
            number = counts(level, index)
            sizes = np.arange(1, len(number) + 1)
            for entry in entries:
                taken, room = one.entries[entry]
                size = int(sizes[(sizes * number == taken) & (rooms[index] == room)][0])
                picks.append((index, size, taken))
        return _trimmed(picks, samples, firsts, nexts)


def _between(firsts: Sequence[Floats], nexts: Sequence[Floats], low: float, high: float, samples: int) -> list[float]:
    """Return all step times of whole micro-batches above ``low`` and up to ``high``."""
    found: set[float] = set()
    for first, more in zip(firsts, nexts, strict=True):
        start = np.maximum(np.floor((low - first) / more), 0)
        end = np.minimum(np.floor((high - first) / more), samples)
        for begin, step, a, b in zip(first.tolist(), more.tolist(), start.tolist(), end.tolist(), strict=True):
            times = (begin + number * step for number in range(int(a), int(b) + 1))
            found.update(time for time in times if low < time <= high)
    return sorted(found)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Return neighbouring numbers of which only the larger one fulfils a condition that ``high`` fulfils."""
    for _ in range(_STEPS_OF_BISECTION):
        middle = (low + high) / 2
        if middle in (low, high) or high - low <= _CLOSE * high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def _evenly(total: int, number: int) -> list[int]:
    """Return whole parts that differ by one at most, larger ones first."""
    part, more = divmod(total, number)
    return [part + 1] * more + [part] * (number - more)


def _adjusted(free: list[int], left: int, limits: Sequence[int]) -> list[int]:
    """Return samples by kind with ``left`` more of them, or fewer where it is negative, within limits."""
    for index, limit in enumerate(limits):
        change = min(left, limit - free[index]) if left > 0 else max(left, -free[index])
        free[index] += change
        left -= change
    return free


def _trimmed(
    picks: Sequence[tuple[int, int, int]], samples: int, firsts: Sequence[Floats], nexts: Sequence[Floats]
) -> Work:
    """Return the work of devices that may take more than the batch: what is too much goes from the slowest first.

    Args:
        picks: (kind, largest micro-batch, samples that the device may take).
        samples: the batch.
        firsts: by kind, seconds of the only micro-batch by its size from 1.
        nexts: seconds of each further one.
    """

    def seconds(index: int, size: int, taken: int) -> float:
        return float(firsts[index][size - 1] + (max(1, -(-taken // size)) - 1) * nexts[index][size - 1])

    queue = [(-seconds(*pick), position) for position, pick in enumerate(picks)]
    heapq.heapify(queue)
    left = [taken for *_, taken in picks]
    surplus = sum(left) - samples
    while surplus:
        _, position = heapq.heappop(queue)
        index, size, _ = picks[position]
        # One micro-batch at a time; the last one of all may become smaller.
        fewer = min(surplus, (left[position] - 1) % size + 1)
        left[position] -= fewer
        surplus -= fewer
        if left[position]:
            heapq.heappush(queue, (-seconds(index, size, left[position]), position))
    kinds: list[list[tuple[int, int]]] = [[] for _ in firsts]
    for (index, size, _), taken in zip(picks, left, strict=True):
        kinds[index].append((size, taken))
    slowest = max(seconds(index, size, taken) for (index, size, _), taken in zip(picks, left, strict=True))
    return Work(seconds=slowest, picks=tuple(map(tuple, kinds)))
