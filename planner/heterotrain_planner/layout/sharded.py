"""Sharded members: every device computes all units on its part of a micro-batch, and holds a part of the state.

Parameters are gathered and gradients reduced unit by unit in each pass, so all devices take as many micro-batches.
Shares follow speed and state follows memory, decided together (Cephalo, ICS 2025, decides them one after the other):

- for a largest shard f, ``sharded_step`` finds the shortest pass exactly;
- a larger f gives state more places to be, but collectives wait for it. Branch and bound over intervals of f: the
  collectives of the lower end with the room of the upper end are a bound, and water-filling gives a true solution.

Equal shards, which ``fully_shard`` makes, are the case of f = 1 / devices.

A device's pass is the sum over units of the longer of computing and collectives (``pass_time``); the member's pass is
that of its slowest device. Devices meet at every collective, so units whose relative speeds differ between kinds can
make it longer than that.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract.plan import LayoutKind

from heterotrain_planner.layout.pass_time import DeviceTimes, collectives, gathered_bytes
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import DeviceLayout, PlannedShard, Template
from heterotrain_planner.layout.sharded_step import EqualDevices, ShardedStep, Work
from heterotrain_planner.layout.state_shares import state_ratios

GAP_RATIO = 1e-4
"""Difference of solution and bound at which the search ends: measurements are not that exact."""
MOST_MIXTURES = 64
"""Mixtures of kinds that templates are made for."""
MOST_MICRO_BATCH = 65_536
"""Samples of a member's micro-batch: tables have an entry for each."""
MOST_SEARCHED = 2000
"""Intervals of the largest shard before the search ends with a larger gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solution:
    """A division of one pass with its true time."""

    seconds: float
    work: Work
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Search:
    """What all calls for one member share."""

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    step: ShardedStep
    extra_bytes: int
    equal_shards: bool

    @property
    def smallest_ratio(self) -> float:
        return 1.0 / len(self.kinds)

    def sizes(self, work: Work) -> list[tuple[str, int]]:
        """Return (kind, samples) of each device."""
        return [(name, size) for name, sizes in zip(self.names, work.sizes, strict=True) for size in sizes]

    def settle(self, work: Work, cap_ratio: float) -> _Solution | None:
        """Return the true solution behind a bound: state by water-filling, collectives at its largest shard."""
        rooms = [min(cap_ratio * self.step.state_bytes, self._room(name, size)) for name, size in self.sizes(work)]
        lacking = self.step.state_bytes - sum(rooms)
        if 0 < lacking <= 1e-9 * self.step.state_bytes:
            rooms = [room * self.step.state_bytes / sum(rooms) * (1 + 1e-15) for room in rooms]
        ratios = state_ratios(rooms, min(self.step.state_bytes, sum(rooms)))
        if ratios is None:
            return None
        times = self.step.times(max(ratios))
        slowest = max(float(curve[max(sizes)]) for curve, sizes in zip(times, work.sizes, strict=True))
        return _Solution(seconds=slowest, work=work, ratios=ratios)

    def _room(self, kind: str, size: int) -> float:
        one = self.step.devices[self.names.index(kind)]
        return one.room_bytes - self.step.activation_bytes * max(1, size)


def sharded_template(
    problem: Problem, devices: Sequence[int], micro_batch_samples: int, *, equal_shards: bool = True
) -> Template | None:
    """Return the sharded member with the shortest pass, within ``GAP_RATIO`` of a proved bound; ``None``: none fits.

    Each micro-batch is one pass over all of its devices.

    Args:
        problem: sound.
        devices: of the member, by kind; at least one.
        micro_batch_samples: samples of one pass, at least 1.
        equal_shards: every device holds the same part of the state, as ``fully_shard`` divides it.
    """
    if micro_batch_samples > MOST_MICRO_BATCH:
        return None
    search = _search(problem, devices, micro_batch_samples, equal_shards=equal_shards)
    found = _best(search, micro_batch_samples)
    if found is None:
        return None
    return Template(
        devices=tuple(devices),
        micro_batch_samples=micro_batch_samples,
        first_s=found.seconds,
        next_s=found.seconds,
        layout=_layout(search, found, micro_batch_samples),
    )


def sharded_templates(problem: Problem, *, equal_shards: bool = True) -> tuple[Template, ...]:
    """Return the sharded members that fit, for a cover to choose from, for each size of micro-batch.

    Tried are 2, 4, 8, … devices of a kind, all of a kind, a node of a kind, and all devices together; with unequal
    shards also some mixtures of kinds. Members of one device need no shards.

    Args:
        problem: sound.
        equal_shards: see ``sharded_template``.
    """
    groups: set[tuple[int, ...]] = {tuple(kind.count for kind in problem.kinds)}
    for index, kind in enumerate(problem.kinds):
        sizes = {2**power for power in range(1, kind.count.bit_length())} | {kind.count, kind.devices_per_node}
        groups |= {
            tuple(size if place == index else 0 for place in range(len(problem.kinds)))
            for size in sizes
            if size <= kind.count
        }
    if not equal_shards:
        groups |= _mixtures(problem)
    found = (
        sharded_template(problem, counts, size, equal_shards=equal_shards)
        for counts in sorted(groups)
        for size in problem.micro_batches
        if sum(counts) > 1
    )
    return tuple(template for template in found if template is not None)


def _mixtures(problem: Problem) -> set[tuple[int, ...]]:
    """Return numbers of devices by kind: none, one, half, or all of each; fewer where that makes too many."""
    counts = [kind.count for kind in problem.kinds]
    for amounts in (
        [{0, 1, count // 2, count} for count in counts],
        [{0, 1, count} if count else {0} for count in counts],
        [{0, count} for count in counts],
    ):
        choices = [
            sorted(number for number in each if number <= count) for each, count in zip(amounts, counts, strict=True)
        ]
        if math.prod(map(len, choices)) <= MOST_MIXTURES:
            return {each for each in itertools.product(*choices) if sum(map(bool, each)) > 1}
    return set()


def _search(problem: Problem, devices: Sequence[int], samples: int, *, equal_shards: bool) -> _Search:
    used = [(kind, number) for kind, number in zip(problem.kinds, devices, strict=True) if number]
    kinds = tuple(kind.name for kind, number in used for _ in range(number))
    extra = gathered_bytes(problem, len(kinds))
    activation = float(sum(unit.activation_bytes for unit in problem.units))
    equal = []
    for kind, number in used:
        room = float(kind.memory_bytes - extra)
        fitting = samples if activation <= 0 else max(1, min(samples, int(max(0.0, room) // activation)))
        equal.append(EqualDevices(count=number, room_bytes=room, times=DeviceTimes(problem, kind.name, fitting)))
    state = problem.state_ratio * sum(unit.parameter_bytes for unit in problem.units)
    ring = collectives(problem, kinds)
    return _Search(
        kinds=kinds,
        names=tuple(kind.name for kind, _ in used),
        step=ShardedStep(devices=equal, ring=ring, activation_bytes=activation, state_bytes=state),
        extra_bytes=extra,
        equal_shards=equal_shards,
    )


def _best(search: _Search, samples: int) -> _Solution | None:
    """Return the best division of a pass, ``None`` where none fits."""
    low = search.smallest_ratio
    order = itertools.count()
    best: _Solution | None = None
    queue: list[tuple[float, int, float, float]] = []

    def consider(paced: float, cap: float) -> None:
        nonlocal best
        work = search.step.each_pass(samples, paced_ratio=paced, cap_ratio=cap)
        if work is None:
            return
        solution = search.settle(work, cap)
        if solution is not None and (best is None or solution.seconds < best.seconds):
            best = solution
        heapq.heappush(queue, (work.seconds, next(order), paced, cap))

    consider(low, low if search.equal_shards else 1.0)
    for _ in range(MOST_SEARCHED):
        if best is None or not queue or queue[0][0] >= best.seconds * (1 - GAP_RATIO):
            break
        _, _, paced, cap = heapq.heappop(queue)
        if cap <= paced:
            continue
        # The geometric middle: a ratio of shards matters as a ratio of times.
        middle = (paced * cap) ** 0.5 if cap / paced > 1 + GAP_RATIO / 4 else cap
        consider(middle, cap)
        if middle < cap:
            consider(paced, middle)
    return best


def _layout(search: _Search, found: _Solution, samples: int) -> DeviceLayout:
    """Return the shards; samples that are too many are taken from the devices with most of them."""
    sizes = search.sizes(found.work)
    shares = [size for _, size in sizes]
    for _ in range(sum(shares) - samples):
        shares[shares.index(max(shares))] -= 1
    step = search.step
    return DeviceLayout(
        kind=LayoutKind.SHARDED,
        shards=tuple(
            PlannedShard(
                kind=kind,
                state_ratio=ratio,
                share_samples=share,
                micro_batch_samples=size,
                memory_bytes=round(
                    ratio * step.state_bytes + max(1, size) * step.activation_bytes + search.extra_bytes
                ),
            )
            for (kind, size), ratio, share in zip(sizes, found.ratios, shares, strict=True)
        ),
    )
