"""Random small problems of sharded members, and their optimum by trying every division.

The formulas are written down anew, unit by unit and device by device.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem


def a_problem(seed: int, *, most_devices: int = 3) -> tuple[Problem, dict[str, int], int]:
    """Return a random problem, the member's devices, and its share."""
    rng = random.Random(seed)
    names = ["a", "b", "c"][: rng.randint(1, 3)]
    units = []
    for index in range(rng.randint(1, 4)):
        seconds = {}
        for name in names:
            seconds[name] = tuple(
                UnitSeconds(
                    micro_batch_samples=size,
                    forward_s=rng.uniform(0.2, 1) + rng.uniform(0.1, 2) * size,
                    backward_s=rng.uniform(0.2, 1) + rng.uniform(0.1, 3) * size,
                )
                for size in sorted(rng.sample(range(1, 6), rng.randint(1, 3)))
            )
        units.append(
            UnitProfile(
                name=f"u{index}",
                parameter_bytes=rng.randint(5, 40),
                activation_bytes=rng.choice([0, rng.randint(1, 40)]),
                boundary_bytes=1,
                seconds=seconds,
            )
        )
    devices = dict.fromkeys(names, 0)
    for _ in range(rng.randint(1, most_devices)):
        devices[rng.choice(names)] += 1
    # About as much memory as is needed, in uneven parts, and links about as slow as the devices: all limits matter.
    number, share = sum(devices.values()), rng.randint(1, 6)
    state_ratio = rng.choice([1.0, 4.0])
    state = state_ratio * sum(unit.parameter_bytes for unit in units)
    activation = sum(unit.activation_bytes for unit in units)
    room = rng.uniform(0.98, 1.3) * state + activation * rng.uniform(number, number + share)
    weights = {name: rng.choice([0.3, 1.0, 2.5]) * rng.uniform(0.8, 1.2) for name in names}
    whole = sum(weights[name] * count for name, count in devices.items())
    extra = 2 * sum(unit.parameter_bytes for unit in units) if number > 1 else 0
    kinds = tuple(
        DeviceKind(
            name=name,
            count=max(1, devices[name]),
            memory_bytes=int(room * weights[name] / whole + extra * rng.uniform(0.7, 1.1)),
        )
        for name in names
    )
    speed = rng.choice([math.inf, rng.uniform(1, 20), rng.uniform(5, 60)])
    problem = Problem(
        units=tuple(units),
        kinds=kinds,
        default_link=Link(bytes_per_s=speed, latency_s=rng.choice([0.0, rng.uniform(0, 0.3)])),
        state_ratio=state_ratio,
        batch_samples=6,
        micro_batches=(1,),
        reduces_late=rng.random() < 0.5,
        ends_inside=rng.random() < 0.5,
    )
    return problem, devices, share


def seconds(points: Sequence[UnitSeconds], size: int, part: str) -> float:
    """Return the longest measured time of any size up to this one."""
    return max(_interpolated(points, smaller, part) for smaller in range(1, max(1, size) + 1))


def _interpolated(points: Sequence[UnitSeconds], size: int, part: str) -> float:
    known = [(point.micro_batch_samples, getattr(point, part)) for point in points]
    if size <= known[0][0]:
        return float(known[0][1])
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if x0 <= size <= x1:
            return float(y0 + (y1 - y0) * (size - x0) / (x1 - x0))
    return float(known[-1][1] * size / known[-1][0])


def collective_s(problem: Problem, number: int, size: float, largest: float) -> float:
    link = problem.default_link
    return 0.0 if number == 1 else (number - 1) * (link.latency_s + largest * size / link.bytes_per_s)


def pass_s(problem: Problem, kind: str, size: int, number: int, largest: float) -> float:
    """Return one forward and backward pass with collectives, event by event."""
    units = problem.units
    sizes = [unit.parameter_bytes for unit in units]
    moved = [collective_s(problem, number, size_bytes, largest) for size_bytes in sizes]
    if problem.reduces_late:
        return _late_pass_s(problem, kind, size, moved)
    clock = moved[0]
    for index, unit in enumerate(units):
        beside = moved[index + 1] if index + 1 < len(units) else 0.0
        clock += max(seconds(unit.seconds[kind], size, "forward_s"), beside)
    for index in reversed(range(len(units))):
        beside = moved[index + 1] if index + 1 < len(units) else 0.0
        if index:
            beside += moved[index - 1]
        clock += max(seconds(units[index].seconds[kind], size, "backward_s"), beside)
    return clock + moved[0]


def _late_pass_s(problem: Problem, kind: str, size: int, moved: Sequence[float]) -> float:
    """Return a pass of the trainer's members of several workers: one clock of the device and one of its link."""
    units = problem.units
    stay = set() if problem.ends_inside else {0, len(units) - 1}
    inner = [index for index in range(len(units)) if index not in stay]
    clock = sum(moved[index] for index in stay)
    arrived = dict.fromkeys(stay, clock)

    def begin(index: int) -> None:
        arrived[index] = clock + moved[index]

    if inner:
        begin(inner[0])
    for index in range(len(units)):
        clock = max(clock, arrived[index])
        if index in inner and index + 1 in inner:
            begin(index + 1)
        clock += seconds(units[index].seconds[kind], size, "forward_s")
    reduced = set()
    for index in reversed(range(len(units))):
        if index + 1 in inner and index in inner:
            clock += moved[index + 1]
            reduced.add(index + 1)
        clock = max(clock, arrived[index])
        if index in inner and index - 1 in inner:
            begin(index - 1)
        clock += seconds(units[index].seconds[kind], size, "backward_s")
    return clock + sum(moved[index] for index in range(len(units)) if index not in reduced)


def whole_units_bytes(problem: Problem, number: int) -> int:
    sizes = [unit.parameter_bytes for unit in problem.units]
    if number == 1:
        return 0
    most = 0
    if problem.reduces_late:  # the ends stay, or are as the others; then each pass of those, event by event
        stay, inner = 2 * (sizes[0] + (sizes[-1] if len(sizes) > 1 else 0)), sizes[1:-1]
        if problem.ends_inside:
            stay, inner = 0, sizes
        for index, own in enumerate(inner):
            before, after = sum(inner[max(0, index - 1) : index]), sum(inner[index + 1 : index + 2])
            # The last one is parameters on their way, the gradient, and parts of sums that arrive.
            most = max(most, own + after, 2 * own + before, before + own + own)
        return stay + most
    for index, own in enumerate(sizes):
        before = sizes[index - 1] if index else 0
        after = sizes[index + 1] if index + 1 < len(sizes) else 0
        most = max(most, 2 * own + before + after)
    return most


def largest_ratio(rooms: Sequence[float], state: float) -> float | None:
    """Return the least largest fraction by bisection."""
    if sum(rooms) < state:
        return None
    low, high = 0.0, max(rooms)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(min(room, middle) for room in rooms) >= state else (middle, high)
    return high / state


def least_pass_s(problem: Problem, devices: dict[str, int], size: int, *, equal_shards: bool) -> float | None:
    """Return the least pass over so many samples of all divisions, ``None`` where none fits."""
    kinds = [kind.name for kind in problem.kinds for _ in range(devices.get(kind.name, 0))]
    memory = {kind.name: kind.memory_bytes for kind in problem.kinds}
    number = len(kinds)
    extra = whole_units_bytes(problem, number)
    activation = sum(unit.activation_bytes for unit in problem.units)
    state = problem.state_ratio * sum(unit.parameter_bytes for unit in problem.units)
    best: float | None = None
    for chosen in itertools.product(range(size + 1), repeat=number):
        if sum(chosen) < size:
            continue
        rooms = [memory[kind] - extra - activation * max(1, m) for kind, m in zip(kinds, chosen, strict=True)]
        if min(rooms) < 0:
            continue
        largest = largest_ratio(rooms, state)
        if equal_shards:
            largest = 1 / number if min(rooms) >= state / number - 1e-9 else None
        if largest is None:
            continue
        step = max(pass_s(problem, kind, m, number, largest) for kind, m in zip(kinds, chosen, strict=True))
        best = step if best is None else min(best, step)
    return best
