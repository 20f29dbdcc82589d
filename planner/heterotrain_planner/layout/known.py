"""The predicted step of members whose layouts are given, such as those of a plan in force.

As for members that the planner chooses: simulated schedules, the best shares, the exchange, and the update. So both may
be compared, whatever measurements say of either.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from heterotrain_core.contract.plan import Layout, LayoutKind, Member

from heterotrain_planner.layout.costs import seconds_at
from heterotrain_planner.layout.cover import divide
from heterotrain_planner.layout.exchange import exchange_seconds
from heterotrain_planner.layout.pass_time import DeviceTimes, collectives
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import DeviceLayout, NoLayout, PlannedShard, PlannedStage
from heterotrain_planner.layout.schedule import passes, share_seconds
from heterotrain_planner.layout.update import update_seconds
from heterotrain_planner.layout.worked_out import WorkedOut, curve_of


def known_step_seconds(
    problem: Problem, members: Sequence[Member], kinds: Sequence[Sequence[str]]
) -> tuple[float, float] | None:
    """Return the step of these members with the best shares, and its exchange; ``None`` for layouts of another model.

    Args:
        problem: sound.
        members: at least one, with the shares and the sizes of their micro-batches.
        kinds: of the devices of each member, by stage or shard.
    """
    found = [_worked_out(problem, member, own) for member, own in zip(members, kinds, strict=True)]
    choices = {index: each for index, each in enumerate(found) if each is not None}
    divided = divide(problem, choices, range(len(members))) if len(choices) == len(members) else None
    if divided is None or isinstance(divided, NoLayout):
        return None
    kept, micro_batches, _ = divided
    slowest_s = max(choices[index].seconds(count) for index, count in zip(kept, micro_batches, strict=True))
    exchange_s = exchange_seconds(problem, [choices[index].layout for index in sorted(kept)])
    return slowest_s + exchange_s, exchange_s


def _worked_out(problem: Problem, member: Member, kinds: Sequence[str]) -> WorkedOut | None:
    layout, samples = member.layout, member.micro_batch_samples or max(1, member.share_samples)
    if len(kinds) != layout.ranks or not set(kinds) <= {kind.name for kind in problem.kinds}:
        return None
    if layout.kind is LayoutKind.SHARDED:
        return _sharded(problem, layout, kinds, samples) if layout.state_weights else None
    edges = (0, *layout.cuts, len(problem.units))
    if layout.shards > 1 or any(end <= first for first, end in itertools.pairwise(edges)):
        return None
    kind_of = (*kinds, kinds[-1])
    stages = tuple(
        _stage(
            problem,
            kind_of[max(0, index - 1) : index + 2] if index else (kind_of[0], *kind_of[:2]),
            edge,
            samples,
            again=index in layout.recomputing,
        )
        for index, edge in enumerate(itertools.pairwise(edges))
    )
    count = max(1, member.micro_batches)
    slowest_s = max(stage.busy_s for stage in stages)
    found = DeviceLayout(kind=layout.kind, stages=stages)
    update_s = update_seconds(problem, found)
    return WorkedOut(
        layout=found,
        micro_batch_samples=samples,
        most_micro_batches=-(-(member.cap_samples or problem.batch_samples) // samples),
        roomy_slowest_s=slowest_s,
        update_s=update_s,
        curve=curve_of(
            slowest_s / samples,
            max(0.0, share_seconds(passes(stages), count) - count * slowest_s) + update_s,
        ),
    )


def _stage(problem: Problem, kinds: Sequence[str], edge: tuple[int, int], samples: int, *, again: bool) -> PlannedStage:
    """Return a stage of units ``[first, end)``, with the kinds before, of and behind it.

    With ``again``, it computes activations again, but for those of the model's first and last unit.
    """
    before, own, behind = kinds
    first, end = edge
    times = [seconds_at(unit.seconds[own], samples) for unit in problem.units[first:end]]
    inner = times[1 if first == 0 else 0 : -1 if end == len(problem.units) else None] if again else []

    def arrives_s(other: str, unit: int) -> float:
        return problem.link(other, own).seconds(samples * problem.units[unit].boundary_bytes)

    return PlannedStage(
        kind=own,
        first_unit=first,
        last_unit=end - 1,
        forward_s=sum(forward_s for forward_s, _ in times),
        backward_s=sum(backward_s for _, backward_s in times) + sum(forward_s for forward_s, _ in inner),
        input_s=arrives_s(before, first - 1) if first else 0.0,
        gradient_s=arrives_s(behind, end - 1) if end < len(problem.units) else 0.0,
        memory_bytes=0,
        recomputes=again,
    )


def _sharded(problem: Problem, layout: Layout, kinds: Sequence[str], samples: int) -> WorkedOut:
    parts = [layout.sample_part(samples, shard) for shard in range(layout.shards)]
    sizes = [stop - start for start, stop in parts]
    whole = sum(layout.state_weights)
    ratios = [weight / whole for weight in layout.state_weights]
    ring = collectives(problem, kinds)
    times = {kind: DeviceTimes(problem, kind, max(sizes)) for kind in set(kinds)}
    curves = {kind: each.overlapped_s(ring, max(ratios)) for kind, each in times.items()}
    pass_s = max(float(curves[kind][size]) for kind, size in zip(kinds, sizes, strict=True))
    shards = tuple(
        PlannedShard(kind=kind, state_ratio=ratio, share_samples=size, micro_batch_samples=size, memory_bytes=0)
        for kind, ratio, size in zip(kinds, ratios, sizes, strict=True)
    )
    found = DeviceLayout(kind=layout.kind, shards=shards)
    update_s = update_seconds(problem, found)
    return WorkedOut(
        layout=found,
        micro_batch_samples=samples,
        most_micro_batches=-(-problem.batch_samples // samples),
        roomy_slowest_s=pass_s,
        update_s=update_s,
        curve=curve_of(pass_s / samples, update_s),
    )
