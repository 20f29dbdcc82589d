"""Pipelines as published planners would make them, judged by one simulation of their schedules.

Each planner is a rule for the cut of each group of devices, and one for the shares:

======== ======================================= ==============================
name     cut                                     shares
======== ======================================= ==============================
even     equal layers (Oobleck, AMP)             equal
whale    nominal speed; layers move to memory    nominal speed
hetpipe  least slowest stage, memory by position in proportion to their rates
metis    measured speed; repaired for memory     in proportion to speed
sailor   least slowest stage                     equal
malleus  least slowest stage                     integer programme, m ≥ stages
======== ======================================= ==============================

Every planner may try all groupings and all sizes of micro-batch, and keeps the best by the simulation: more than its
own rules and its own cost model allow it. Groups that do not fit stay idle.

Simplified: one stage is one device (no tensor parallelism, no data parallelism inside a stage). HetPipe's asynchronous
waves are read as synchronous steps. AMP cuts by times that are averaged over kinds, so on equal layers its cut is the
even one. Oobleck's templates are for equal nodes, so they are even cuts, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.balance import Split, balance, in_proportion
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.layout.costs import Costs, costs_of
from heterotrain_planner.layout.cut import cut, layout_of
from heterotrain_planner.layout.exchange import exchange_seconds
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import DeviceLayout
from heterotrain_planner.layout.schedule import passes, share_seconds
from heterotrain_planner.layout.update import update_seconds

Group = tuple[int, ...]
"""Index of the kind of each device, in the order of the stages."""
Stages = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """What a planner's best plan takes.

    Attributes:
        name: of the planner.
        step_s: simulated, with the exchange.
        layouts: of its members.
        micro_batches: of each member.
        micro_batch_samples: the same for all.
        idle_devices: in no member.
    """

    name: str
    step_s: float
    layouts: tuple[DeviceLayout, ...]
    micro_batches: tuple[int, ...]
    micro_batch_samples: int
    idle_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """A published planner as two rules.

    Attributes:
        name: short.
        cut: stages of a group, ``None`` where it finds none.
        shares: equal, in proportion to rate or to nominal speed, or the exact split.
    """

    name: str
    cut: Callable[[Problem, Costs, Group, Mapping[str, float]], Stages | None]
    shares: str


def groupings(problem: Problem) -> dict[str, list[Group]]:
    """Return ways to form members, by name.

    All devices; one of each kind and by kind (HetPipe's ED and NP); pairs of a large and a small kind (its HD); and
    several equal mixtures.
    """
    counts = [kind.count for kind in problem.kinds]
    # Larger memories in front: earlier stages keep more micro-batches.
    order = sorted(range(len(counts)), key=lambda index: -problem.kinds[index].memory_bytes)
    least = min(counts)
    found = {
        "all": [tuple(index for index in order for _ in range(counts[index]))],
        "each": [tuple(order)] * least,
        "kind": [(index,) * counts[index] for index in order],
    }
    for parts in (2, 3, 4):
        if sum(counts) % parts == 0:
            found[f"parts{parts}"] = [found["all"][0][start::parts] for start in range(parts)]
    if len(counts) % 2 == 0:
        pairs = [(order[index], order[-1 - index]) for index in range(len(order) // 2)]
        found["pairs"] = [
            tuple(kind for kind in pair for _ in range(counts[kind] // 2)) for pair in pairs for _ in "ab"
        ]
    return found


def equal_layers(_problem: Problem, costs: Costs, group: Group, _nominal: Mapping[str, float]) -> Stages | None:
    """Return stages of equally many units."""
    return _by_weight(costs, group, [1.0] * len(group))


def by_nominal_speed(problem: Problem, costs: Costs, group: Group, nominal: Mapping[str, float]) -> Stages | None:
    """Return stages by nominal speed; units move from a stage over memory to the fastest with room (Whale, 3.3.1)."""
    stages = _by_weight(costs, group, [nominal[problem.kinds[kind].name] for kind in group])
    return _repaired(costs, group, stages)


def by_measured_speed(_problem: Problem, costs: Costs, group: Group, _nominal: Mapping[str, float]) -> Stages | None:
    """Return stages by measured speed, repaired for memory in the same way (Metis)."""
    return _repaired(costs, group, _by_weight(costs, group, [1.0 / float(costs.compute_E(k)[-1]) for k in group]))


def least_slowest(problem: Problem, costs: Costs, group: Group, _nominal: Mapping[str, float]) -> Stages | None:
    """Return the stages whose slowest one is fastest, within memory by position, over all orders."""
    devices = [group.count(kind) for kind in range(len(problem.kinds))]
    found = cut(costs, devices, -(-problem.batch_samples // costs.micro_batch_samples))
    return found.stages if found else None


PLANNERS = (
    Planner(name="even", cut=equal_layers, shares="equal"),
    Planner(name="whale", cut=by_nominal_speed, shares="nominal"),
    Planner(name="hetpipe", cut=least_slowest, shares="rate"),
    Planner(name="metis", cut=by_measured_speed, shares="rate"),
    Planner(name="sailor", cut=least_slowest, shares="equal"),
    Planner(name="malleus", cut=least_slowest, shares="exact"),
)


def best_step(problem: Problem, planner: Planner, nominal: Mapping[str, float]) -> PlannedStep | None:
    """Return the planner's best plan by simulation, ``None`` where none of its plans fits in memory."""
    best: PlannedStep | None = None
    devices = sum(kind.count for kind in problem.kinds)
    for size in problem.micro_batches:
        costs = costs_of(problem, size)
        total = -(-problem.batch_samples // size)
        for groups in groupings(problem).values():
            members = [
                (group, layout_of(problem, costs, stages))
                for group in groups
                if (stages := planner.cut(problem, costs, group, nominal)) and _fits(costs, stages)
            ]
            counts = _shares(problem, planner, members, nominal, total) if members else None
            if counts is None:
                continue
            used = [(layout, count) for (_, layout), count in zip(members, counts, strict=True) if count]
            slowest_s = max(
                share_seconds(passes(layout.stages), count) + update_seconds(problem, layout) for layout, count in used
            )
            step_s = slowest_s + exchange_seconds(problem, [layout for layout, _ in used])
            if best is None or step_s < best.step_s:
                best = PlannedStep(
                    name=planner.name,
                    step_s=step_s,
                    layouts=tuple(layout for layout, _ in used),
                    micro_batches=tuple(count for _, count in used),
                    micro_batch_samples=size,
                    idle_devices=devices - sum(len(layout.stages) for layout, _ in used),
                )
    return best


def _shares(
    problem: Problem,
    planner: Planner,
    members: Sequence[tuple[Group, DeviceLayout]],
    nominal: Mapping[str, float],
    total: int,
) -> list[int] | None:
    """Return the micro-batches of each member, ``None`` where the batch is too small."""
    slowest = [max(stage.busy_s for stage in layout.stages) for _, layout in members]
    if planner.shares == "exact":
        split = balance(
            total,
            [
                SplitMember(
                    compute=ComputeTime(
                        per_sample_s=each,
                        fixed_s=0.0,
                        backward_per_sample_s=0.0,
                        backward_fixed_s=0.0,
                        update_s=sum(stage.busy_s for stage in layout.stages) - each,
                    ),
                    floor_samples=len(layout.stages),
                )
                for each, (_, layout) in zip(slowest, members, strict=True)
            ],
        )
        return list(split.shares) if isinstance(split, Split) else None
    weights = {
        "equal": [1.0] * len(members),
        "rate": [1.0 / each for each in slowest],
        "nominal": [sum(nominal[problem.kinds[kind].name] for kind in group) for group, _ in members],
    }[planner.shares]
    return list(in_proportion(total, [round(2**30 * weight / max(weights)) for weight in weights]))


def _fits(costs: Costs, stages: Stages) -> bool:
    last = len(stages)
    return all(_bytes(costs, stage, last - place) <= costs.memory_K[stage[0]] for place, stage in enumerate(stages))


def _bytes(costs: Costs, stage: tuple[int, int, int], position: int) -> float:
    _, edge, end = stage
    state = costs.state_E[end] - costs.state_E[edge]
    return float(state + costs.kept(position) * (costs.activation_E[end] - costs.activation_E[edge]))


def _by_weight(costs: Costs, group: Group, weights: Sequence[float]) -> Stages:
    """Return stages with units in proportion to weights, by largest remainder, at least one each."""
    units = len(costs.unit_E) - 1
    extra = in_proportion(units - len(group), [round(2**30 * w / max(weights)) for w in weights])
    edge, found = 0, []
    for kind, more in zip(group, extra, strict=True):
        found.append((kind, edge, edge + 1 + more))
        edge += 1 + more
    return tuple(found)


def _repaired(costs: Costs, group: Group, stages: Stages) -> Stages | None:
    """Return the stages after units have moved from stages over memory to the one with room that ends first."""
    sizes = [end - edge for _, edge, end in stages]

    def laid_out(counts: Sequence[int]) -> Stages:
        edges = [sum(counts[:index]) for index in range(len(counts) + 1)]
        return tuple((kind, edges[i], edges[i + 1]) for i, kind in enumerate(group))

    for _ in range(len(costs.unit_E) * len(group)):
        now = laid_out(sizes)
        over = [i for i, stage in enumerate(now) if _bytes(costs, stage, len(now) - i) > costs.memory_K[stage[0]]]
        if not over:
            return now
        worst = max(over, key=lambda i: _seconds(costs, now[i]))
        if sizes[worst] == 1:
            return None
        options = []
        for index in range(len(sizes)):
            more = list(sizes)
            more[worst] -= 1
            more[index] += 1
            moved = laid_out(more)
            if index != worst and _bytes(costs, moved[index], len(now) - index) <= costs.memory_K[moved[index][0]]:
                options.append((_seconds(costs, moved[index]), index))
        if not options:
            return None
        sizes[worst] -= 1
        sizes[min(options)[1]] += 1
    return None


def _seconds(costs: Costs, stage: tuple[int, int, int]) -> float:
    kind, edge, end = stage
    return float(costs.compute_E(kind)[end] - costs.compute_E(kind)[edge])
