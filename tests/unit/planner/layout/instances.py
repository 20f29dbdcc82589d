"""Random problems for the tests of the layout planner, and an exhaustive search as their oracle."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from heterotrain.parts.stages.schedule_1f1b import Pass, passes
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem

SPEEDS = (1.0, 1.7, 3.1, 4.4)


def a_problem(
    rng: random.Random,
    *,
    kinds: int = 2,
    units: int = 5,
    most: int = 2,
    memory: tuple[float, float] = (300, 1200),
    micro_batches: tuple[int, ...] = (1,),
    batch_samples: int = 64,
    **limits: int,
) -> Problem:
    """Return a random problem: uneven units, kinds whose relative speed differs by unit, several links."""
    names = [f"k{index}" for index in range(kinds)]
    profiles = []
    for unit in range(units):
        seconds = {}
        for name, slow in zip(names, SPEEDS, strict=False):
            base = rng.uniform(0.5, 2) * slow
            fixed = rng.uniform(0, 0.3)
            seconds[name] = tuple(
                UnitSeconds(micro_batch_samples=b, forward_s=fixed + base * b / 3, backward_s=base * b * 2 / 3)
                for b in micro_batches
            )
        profiles.append(
            UnitProfile(
                name=f"u{unit}",
                parameter_bytes=rng.randint(10, 60),
                activation_bytes=rng.randint(5, 50),
                boundary_bytes=rng.choice([0, 1, 10, 30]),
                seconds=seconds,
            )
        )
    devices = tuple(
        DeviceKind(name=name, count=rng.randint(0, most), memory_bytes=int(rng.uniform(*memory))) for name in names
    )
    if not any(kind.count for kind in devices):
        devices = (DeviceKind(name=names[0], count=1, memory_bytes=1000), *devices[1:])
    # As many different links as the planner tells apart.
    choices = [Link(), Link(bytes_per_s=100.0, latency_s=0.05), Link(bytes_per_s=20.0)]
    pairs = list(itertools.combinations_with_replacement(names, 2))
    links = {pair: rng.choice(choices) for pair in pairs}
    return Problem(
        units=tuple(profiles),
        kinds=devices,
        links=links if rng.random() < 0.7 else {},
        state_ratio=4.0,
        batch_samples=batch_samples,
        micro_batches=micro_batches,
        **limits,  # type: ignore[arg-type]  # integers only
    )


def pipelines(
    problem: Problem, devices: Sequence[int], *, size: int = 1
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], list[float]]]:
    """Yield every order of exactly these devices with every cut that memory permits, and the stages' busy seconds.

    Everything is computed from the problem itself: nothing is shared with the planner.
    """
    names = [kind.name for kind, count in zip(problem.kinds, devices, strict=True) for _ in range(count)]
    index = {kind.name: number for number, kind in enumerate(problem.kinds)}
    last = len(problem.units)
    batches = math.ceil(problem.batch_samples / size)
    for order in sorted(set(itertools.permutations(names))):
        stages = len(order)
        for cuts in itertools.combinations(range(1, last), stages - 1):
            edges = (0, *cuts, last)
            busy = []
            for stage, name in enumerate(order):
                units = problem.units[edges[stage] : edges[stage + 1]]
                kept = most_kept(stage=stage, stages=stages, micro_batches=batches)
                needed = sum(u.parameter_bytes * problem.state_ratio + kept * size * u.activation_bytes for u in units)
                if needed > problem.kinds[index[name]].memory_bytes:
                    break
                seconds = sum(_seconds(unit.seconds[name], size) for unit in units)
                if stage > 0:
                    received = problem.units[edges[stage] - 1].boundary_bytes * size
                    seconds += problem.link(order[stage - 1], name).seconds(received)
                if stage < stages - 1:
                    received = units[-1].boundary_bytes * size
                    seconds += problem.link(name, order[stage + 1]).seconds(received)
                busy.append(seconds)
            if len(busy) == stages:
                yield tuple(index[name] for name in order), cuts, busy


@functools.cache
def most_kept(*, stage: int, stages: int, micro_batches: int) -> int:
    """Return how many micro-batches the trainer's own order of passes keeps at once on a stage."""
    kept = most = 0
    for each, _ in passes(stage=stage, stages=stages, micro_batches=micro_batches):
        kept += 1 if each is Pass.FORWARD else -1
        most = max(most, kept)
    return most


def _seconds(points: Sequence[UnitSeconds], size: int) -> float:
    """Return forward and backward seconds, linear between measurements."""
    total = {point.micro_batch_samples: point.forward_s + point.backward_s for point in points}
    if size in total:
        return total[size]
    below = max((known for known in total if known < size), default=None)
    above = min((known for known in total if known > size), default=None)
    if below is None:
        assert above is not None
        return total[above]
    if above is None:
        return total[below] * size / below
    part = (size - below) / (above - below)
    return total[below] * (1 - part) + total[above] * part
