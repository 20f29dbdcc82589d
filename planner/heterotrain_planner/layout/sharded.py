"""Sharded members: every device computes all units on its part of the share, and holds a part of the training state.

Shares follow speed and state follows memory, decided together (Cephalo, ICS 2025, decides them one after the other):

- for a largest shard f, ``sharded_step`` finds the shortest step exactly;
- a larger f gives state more places to be, but collectives wait for it. Branch and bound over intervals of f: the
  collectives of the lower end with the room of the upper end are a bound, and water-filling gives a true solution;
- with one gathering for each pass, the number of passes is searched in the same queue.

Equal shards, which ``fully_shard`` makes, are the case of f = 1 / devices.

A device's step is the sum over units of the longer of computing and collectives (``pass_time``); the member's step is
that of its slowest device. Devices meet at every collective, so units whose relative speeds differ between kinds can
make the step longer than that: ``lockstep_s`` is the time of devices that wait for each other at every unit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from heterotrain_planner.layout.pass_time import (
    DeviceTimes,
    Gathering,
    collectives,
    gathered_bytes,
    lockstep_seconds,
)
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Layout, LayoutKind, MemberLimit, NoLayout, Shard, Template
from heterotrain_planner.layout.sharded_step import EqualDevices, ShardedStep, Work
from heterotrain_planner.layout.state_shares import state_ratios

GAP_RATIO = 1e-4
"""Difference of solution and bound at which the search ends: measurements are not that exact."""
MOST_MICRO_BATCH = 256
"""Largest micro-batch of a device that gathers once a step. More samples take several."""
MOST_MIXTURES = 64
"""Mixtures of kinds that templates are made for."""
MOST_SHARE = 65_536
"""Samples of a member's share: tables have an entry for each."""
MOST_SEARCHED = 2000
"""Intervals of the largest shard, over all numbers of passes, before the search ends with a larger gap."""
_HIDDEN = 1.001
"""Collectives that lengthen a pass by less do not bind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedMember:
    """One sharded member with its predicted step.

    Attributes:
        layout: its shards.
        share_samples: that it computes in a step.
        gathering: when parameters are gathered.
        micro_batches: of the device that has most; the same for all where each one gathers.
        step_s: seconds of its slowest device, from the first gathering to the last reduction.
        bound_s: no division takes less than this.
        lockstep_s: the step of devices that wait for each other at every unit.
        traffic_bytes: sent by the busiest device in a step.
        limit: what keeps it from more samples in the same time.
        reason: one sentence for people.
    """

    layout: Layout
    share_samples: int
    gathering: Gathering
    micro_batches: int
    step_s: float
    bound_s: float
    lockstep_s: float
    traffic_bytes: float
    limit: MemberLimit
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solution:
    """A division of one pass (or of a whole step) with its true times."""

    seconds: float
    passes: int
    work: Work
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Search:
    """What all calls for one member share."""

    problem: Problem
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    step: ShardedStep
    gathering: Gathering
    extra_bytes: int
    equal_shards: bool

    @property
    def smallest_ratio(self) -> float:
        return 1.0 / len(self.kinds)

    def solve(self, passes: int, samples: int, paced_ratio: float, cap_ratio: float) -> Work | None:
        find = self.step.once if self.gathering is Gathering.ONCE else self.step.each_pass
        return find(-(-samples // passes), paced_ratio=paced_ratio, cap_ratio=cap_ratio)

    def sizes(self, work: Work) -> list[tuple[str, int, int]]:
        """Return (kind, micro-batch, samples) of each device."""
        return [(name, *pick) for name, picks in zip(self.names, work.picks, strict=True) for pick in picks]

    def settle(self, work: Work, passes: int, cap_ratio: float) -> _Solution | None:
        """Return the true solution behind a bound: state by water-filling, collectives at its largest shard."""
        rooms = [min(cap_ratio * self.step.state_bytes, self._room(name, size)) for name, size, _ in self.sizes(work)]
        lacking = self.step.state_bytes - sum(rooms)
        if 0 < lacking <= 1e-9 * self.step.state_bytes:
            rooms = [room * self.step.state_bytes / sum(rooms) * (1 + 1e-15) for room in rooms]
        ratios = state_ratios(rooms, min(self.step.state_bytes, sum(rooms)))
        if ratios is None:
            return None
        times = self.step.times(max(ratios))
        slowest = 0.0
        for one, curve, picks in zip(self.step.devices, times, work.picks, strict=True):
            for size, taken in picks:
                more = max(1, -(-taken // max(1, size))) - 1
                slowest = max(slowest, float(curve[size] + more * one.times.compute_M[size]))
        return _Solution(seconds=passes * slowest, passes=passes, work=work, ratios=ratios)

    def _room(self, kind: str, size: int) -> float:
        one = self.step.devices[self.names.index(kind)]
        return one.room_bytes - self.step.activation_bytes * max(1, size)


def sharded_member(
    problem: Problem,
    devices: Mapping[str, int],
    share_samples: int,
    *,
    gathering: Gathering = Gathering.EACH_MICRO_BATCH,
    equal_shards: bool = False,
) -> ShardedMember | NoLayout:
    """Return the sharded member with the shortest step, within ``GAP_RATIO`` of the printed bound.

    Args:
        problem: sound; its batch and its sizes of micro-batches are not used.
        devices: of the member, by kind.
        share_samples: the member's share, at least 1.
        gathering: when parameters are gathered.
        equal_shards: every device holds the same part of the state, as ``fully_shard`` divides it.
    """
    if clause := _problem(problem, devices, share_samples):
        return NoLayout(reason=clause)
    search = _search(problem, devices, share_samples, gathering, equal_shards=equal_shards)
    each = gathering is Gathering.EACH_MICRO_BATCH
    found, bound = _best(search, share_samples, _pass_counts(share_samples) if each else iter((1,)))
    if found is None:
        return _infeasible(search)
    return _described(search, found, share_samples, bound)


def sharded_template(
    problem: Problem, devices: Mapping[str, int], micro_batch_samples: int, *, equal_shards: bool = True
) -> Template | NoLayout:
    """Return a sharded member as a template: each micro-batch is one pass over all of its devices.

    Args:
        problem: sound.
        devices: of the member, by kind; kinds of the problem.
        micro_batch_samples: samples of one pass.
        equal_shards: see ``sharded_member``.
    """
    if clause := _problem(problem, devices, micro_batch_samples):
        return NoLayout(reason=clause)
    search = _search(problem, devices, micro_batch_samples, Gathering.EACH_MICRO_BATCH, equal_shards=equal_shards)
    found, _ = _best(search, micro_batch_samples, iter((1,)))
    if found is None:
        return _infeasible(search)
    whole = sum(unit.parameter_bytes for unit in problem.units)
    return Template(
        devices=tuple(devices.get(kind.name, 0) for kind in problem.kinds),
        micro_batch_samples=micro_batch_samples,
        first_s=found.seconds,
        next_s=found.seconds,
        exchange_bytes=round(max(found.ratios) * whole),
        layout=_layout(search, found, micro_batch_samples),
    )


def sharded_templates(problem: Problem, *, equal_shards: bool = True) -> tuple[Template, ...]:
    """Return the sharded members that fit, for a cover to choose from, for each size of micro-batch.

    Tried are 2, 4, 8, … devices of a kind, all of a kind, a node of a kind, and all devices together; with unequal
    shards also some mixtures of kinds. Members of one device need no shards.

    Args:
        problem: sound.
        equal_shards: see ``sharded_member``.
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
    names = [kind.name for kind in problem.kinds]
    found = (
        sharded_template(problem, dict(zip(names, counts, strict=True)), size, equal_shards=equal_shards)
        for counts in sorted(groups)
        for size in problem.micro_batches
        if sum(counts) > 1
    )
    return tuple(template for template in found if isinstance(template, Template))


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


def _problem(problem: Problem, devices: Mapping[str, int], samples: int) -> str | None:
    names = {kind.name for kind in problem.kinds}
    if unknown := sorted(set(devices) - names):
        return f"{unknown[0]} is no device kind of the problem"
    if min(devices.values(), default=0) < 0 or not any(devices.values()):
        return "the member has no device: name at least one"
    if not 1 <= samples <= MOST_SHARE:
        return f"a share of {samples} samples is not between 1 and {MOST_SHARE}: divide the batch among more members"
    return None


def _search(
    problem: Problem, devices: Mapping[str, int], samples: int, gathering: Gathering, *, equal_shards: bool
) -> _Search:
    names = tuple(kind.name for kind in problem.kinds if devices.get(kind.name, 0))
    kinds = tuple(name for name in names for _ in range(devices[name]))
    extra = gathered_bytes(problem, len(kinds), gathering)
    activation = float(sum(unit.activation_bytes for unit in problem.units))
    by_name = {kind.name: kind for kind in problem.kinds}
    most = samples if gathering is Gathering.EACH_MICRO_BATCH else min(samples, MOST_MICRO_BATCH)
    equal = []
    for name in names:
        room = float(by_name[name].memory_bytes - extra)
        fitting = most if activation <= 0 else max(1, min(most, int(max(0.0, room) // activation)))
        times = DeviceTimes(problem, name, fitting, gathering)
        equal.append(EqualDevices(count=devices[name], room_bytes=room, times=times))
    ring = collectives(problem, kinds)
    state = problem.state_ratio * sum(unit.parameter_bytes for unit in problem.units)
    step = ShardedStep(devices=equal, ring=ring, activation_bytes=activation, state_bytes=state)
    return _Search(
        problem=problem,
        kinds=kinds,
        names=names,
        step=step,
        gathering=gathering,
        extra_bytes=extra,
        equal_shards=equal_shards,
    )


def _pass_counts(samples: int) -> Iterator[int]:
    """Yield the least number of passes for each size of a pass."""
    passes = 1
    while True:
        yield passes
        size = -(-samples // passes)
        if size == 1:
            return
        passes = -(-samples // (size - 1))


def _best(search: _Search, samples: int, passes: Iterator[int]) -> tuple[_Solution | None, float]:
    """Return the best solution and the bound: the least over all intervals that are left."""
    low = search.smallest_ratio
    high = low if search.equal_shards else 1.0
    order = itertools.count()
    best: _Solution | None = None
    queue: list[tuple[float, int, int, float, float, Work]] = []

    def consider(number: int, paced: float, cap: float) -> None:
        nonlocal best
        work = search.solve(number, samples, paced, cap)
        if work is None:
            return
        solution = search.settle(work, number, cap)
        if solution is not None and (best is None or solution.seconds < best.seconds):
            best = solution
        heapq.heappush(queue, (number * work.seconds, next(order), number, paced, cap, work))

    for number in passes:
        consider(number, low, high)
    for _ in range(MOST_SEARCHED):
        if best is None or not queue or queue[0][0] >= best.seconds * (1 - GAP_RATIO):
            break
        _, _, number, paced, cap, _ = heapq.heappop(queue)
        if cap <= paced:
            continue
        # The geometric middle: a ratio of shards matters as a ratio of times.
        middle = (paced * cap) ** 0.5 if cap / paced > 1 + GAP_RATIO / 4 else cap
        consider(number, middle, cap)
        if middle < cap:
            consider(number, paced, middle)
    bound = min([entry[0] for entry in queue[:1]] + ([best.seconds] if best else []), default=0.0)
    return best, bound


def _layout(search: _Search, found: _Solution, samples: int) -> Layout:
    """Return the shards; what the last pass has too much is taken from the devices with most samples."""
    sizes = search.sizes(found.work)
    shares = [taken * found.passes for _, _, taken in sizes]
    for _ in range(sum(shares) - samples):
        shares[shares.index(max(shares))] -= 1
    step = search.step
    return Layout(
        kind=LayoutKind.SHARDED,
        shards=tuple(
            Shard(
                kind=kind,
                state_ratio=ratio,
                share_samples=share,
                micro_batch_samples=size,
                memory_bytes=round(
                    ratio * step.state_bytes + max(1, size) * step.activation_bytes + search.extra_bytes
                ),
            )
            for (kind, size, _), ratio, share in zip(sizes, found.ratios, shares, strict=True)
        ),
    )


def _described(search: _Search, found: _Solution, samples: int, bound_s: float) -> ShardedMember:
    step, each = search.step, search.gathering is Gathering.EACH_MICRO_BATCH
    sizes = search.sizes(found.work)
    largest = max(found.ratios)
    most = max(max(1, -(-taken // max(1, size))) for _, size, taken in sizes)
    number = found.passes if each else most
    distinct = sorted({(kind, size) for kind, size, _ in sizes})
    lockstep = found.passes * lockstep_seconds(search.problem, step.ring, largest, search.gathering, distinct)
    curves = {name: one.times.compute_M for name, one in zip(search.names, step.devices, strict=True)}
    # Between the first forward and the last backward pass, devices that gather once do not meet.
    lockstep += max((max(1, -(-taken // max(1, size))) - 1) * float(curves[kind][size]) for kind, size, taken in sizes)
    whole = sum(unit.parameter_bytes for unit in search.problem.units)
    limit = _limit(search, found, samples)
    kept = f"parts of {min(found.ratios):.1%} to {largest:.1%} of the state"
    return ShardedMember(
        layout=_layout(search, found, samples),
        share_samples=samples,
        gathering=search.gathering,
        micro_batches=number,
        step_s=found.seconds,
        bound_s=bound_s,
        lockstep_s=lockstep,
        traffic_bytes=(3 * found.passes if each else 2) * (len(search.kinds) - 1) * largest * whole,
        limit=limit,
        reason=f"{len(search.kinds)} devices take {samples} samples in {found.seconds:.4g} s, with {kept}; "
        f"limited by {limit.value.lower()}",
    )


def _limit(search: _Search, found: _Solution, samples: int) -> MemberLimit:
    """Return memory where fewer passes do not fit or a device could compute more, else what paces the slowest one."""
    step = search.step
    if found.passes > 1 and search.solve(found.passes - 1, samples, search.smallest_ratio, 1.0) is None:
        return MemberLimit.MEMORY
    pass_s = found.seconds / found.passes
    times = step.times(max(found.ratios))
    exposed = False
    for one, curve, picks in zip(step.devices, times, found.work.picks, strict=True):
        compute = one.times.compute_M
        for size, taken in picks:
            more = max(1, -(-taken // max(1, size))) - 1
            own = float(curve[size] + more * compute[size])
            exposed |= own >= pass_s / _HIDDEN and own > _HIDDEN * float(compute[size]) * (more + 1)
            idle = pass_s - own
            if search.gathering is Gathering.ONCE and idle > float(compute[size]):
                return MemberLimit.MEMORY
            at_end = size + 1 >= len(curve)
            if search.gathering is Gathering.EACH_MICRO_BATCH and not at_end and float(curve[size + 1]) < pass_s:
                return MemberLimit.MEMORY
    return MemberLimit.LINK if exposed else MemberLimit.COMPUTE


def _infeasible(search: _Search) -> NoLayout:
    """Return the bytes of one sample at a time beside those that there are, and what to do."""
    step, number = search.step, len(search.kinds)
    each = step.activation_bytes + search.extra_bytes
    needed = round(step.state_bytes + number * each)
    by_name = {kind.name: kind.memory_bytes for kind in search.problem.kinds}
    available = sum(by_name[kind] for kind in search.kinds)
    smallest = min(search.names, key=lambda name: by_name[name])
    state = step.state_bytes / number if search.equal_shards else 0.0
    least = each + state
    if by_name[smallest] < least:
        part = " and its equal part of the state" if search.equal_shards else ""
        reason = (
            f"{smallest} has {by_name[smallest]:,} bytes, but one sample, the gathered units{part} need "
            f"{round(least):,}: leave {smallest} out"
        )
        if search.equal_shards and by_name[smallest] >= each:
            reason += ", or divide the state by memory"
        elif search.gathering is Gathering.ONCE:
            reason += ", or gather for each pass"
        else:
            reason += ", or use smaller units"
    else:
        reason = (
            f"{number} devices have {available:,} bytes, but the training state, one sample and the gathered units on "
            f"each need {needed:,}: add devices or memory"
        )
    return NoLayout(reason=reason, needed_bytes=needed, available_bytes=available)
