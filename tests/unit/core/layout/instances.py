"""Random problems for the tests of the layout planner, and an exhaustive search as their oracle."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from heterotrain_core.layout.costs import Costs
from heterotrain_core.layout.problem import DeviceKind, Link, Problem, UnitProfile, UnitSeconds

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
    speeds = [math.inf, 100.0, 20.0]
    pairs = list(itertools.combinations_with_replacement(names, 2))
    links = {pair: Link(bytes_per_s=rng.choice(speeds), latency_s=rng.choice([0.0, 0.05])) for pair in pairs}
    return Problem(
        units=tuple(profiles),
        kinds=devices,
        links=links if rng.random() < 0.7 else {},
        state_ratio=4.0,
        batch_samples=batch_samples,
        micro_batches=micro_batches,
        **limits,  # type: ignore[arg-type]  # integers only
    )


def pipelines(costs: Costs, devices: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], list[float]]]:
    """Yield every order of exactly these devices with every cut that memory permits, and the stages' busy seconds."""
    kinds = [kind for kind, count in enumerate(devices) for _ in range(count)]
    last = len(costs.unit_E) - 1
    for order in sorted(set(itertools.permutations(kinds))):
        stages = len(order)
        for cuts in itertools.combinations(range(1, last), stages - 1):
            edges = (0, *cuts, last)
            busy = []
            for stage, kind in enumerate(order):
                a, b = edges[stage], edges[stage + 1]
                state = costs.state_E[b] - costs.state_E[a]
                activation = costs.activation_E[b] - costs.activation_E[a]
                if state + costs.kept(stages - stage) * activation > costs.memory_K[kind]:
                    break
                seconds = costs.forward_KE[kind, b] - costs.forward_KE[kind, a]
                seconds += costs.backward_KE[kind, b] - costs.backward_KE[kind, a]
                if stage > 0:
                    seconds += costs.receive_CE[costs.class_KK[order[stage - 1], kind], a]
                if stage < stages - 1:
                    seconds += costs.receive_CE[costs.class_KK[kind, order[stage + 1]], b]
                busy.append(float(seconds))
            if len(busy) == stages:
                yield order, cuts, busy
