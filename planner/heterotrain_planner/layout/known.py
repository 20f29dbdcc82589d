"""The predicted step of members whose layouts are given, such as those of a plan in force.

As for the members that the planner chooses: simulated schedules, the best division of the batch, the exchange, and
the update. So both may be compared, whatever measurements say of either.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract import plan

from heterotrain_planner.layout.costs import seconds_at
from heterotrain_planner.layout.cover import divide
from heterotrain_planner.layout.exchange import exchange_seconds
from heterotrain_planner.layout.pass_time import DeviceTimes, collectives
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Layout, NoLayout, Shard, Stage
from heterotrain_planner.layout.schedule import passes, share_seconds
from heterotrain_planner.layout.update import update_seconds
from heterotrain_planner.layout.worked_out import WorkedOut, curve_of


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMember:
    """One member as a plan has it.

    Attributes:
        kinds: of its devices, by stage or shard.
        layout: of the member.
        micro_batch_samples: at least 1.
        share_samples: of the member, at least 1.
    """

    kinds: tuple[str, ...]
    layout: plan.Layout
    micro_batch_samples: int
    share_samples: int


def known_step_seconds(problem: Problem, members: Sequence[KnownMember]) -> float | None:
    """Return the step of these members with the best division of the batch; ``None`` for layouts of another model.

    Args:
        problem: sound.
        members: at least one.
    """
    found = [_worked_out(problem, member) for member in members]
    choices = {index: each for index, each in enumerate(found) if each is not None}
    if len(choices) < len(members):
        return None
    divided = divide(problem, choices, range(len(members)))
    if isinstance(divided, NoLayout):
        return None
    kept, micro_batches, _ = divided
    slowest_s = max(choices[index].seconds(count) for index, count in zip(kept, micro_batches, strict=True))
    return slowest_s + exchange_seconds(problem, [choices[index].layout for index in kept])


def _worked_out(problem: Problem, member: KnownMember) -> WorkedOut | None:
    layout, names = member.layout, {kind.name for kind in problem.kinds}
    if len(member.kinds) != layout.ranks or not set(member.kinds) <= names or min(_sizes(member)) < 1:
        return None
    if layout.kind is plan.LayoutKind.SHARDED:
        return _sharded(problem, member) if layout.state_weights else None
    edges = (0, *layout.cuts, len(problem.units))
    if layout.shards > 1 or any(end <= first for first, end in itertools.pairwise(edges)):
        return None
    kind_of = (*member.kinds, member.kinds[-1])
    stages = tuple(
        _stage(problem, kind_of[max(0, index - 1) : index + 2] if index else (kind_of[0], *kind_of[:2]), edge, member)
        for index, edge in enumerate(itertools.pairwise(edges))
    )
    count = -(-member.share_samples // member.micro_batch_samples)
    slowest_s = max(stage.busy_s for stage in stages)
    found = Layout(kind=layout.kind, stages=stages)
    update_s = update_seconds(problem, found)
    return WorkedOut(
        layout=found,
        micro_batch_samples=member.micro_batch_samples,
        gap_ratio=0.0,
        roomy_slowest_s=slowest_s,
        update_s=update_s,
        curve=curve_of(
            slowest_s / member.micro_batch_samples,
            max(0.0, share_seconds(passes(stages), count) - count * slowest_s) + update_s,
        ),
    )


def _sizes(member: KnownMember) -> tuple[int, int]:
    return member.micro_batch_samples, member.share_samples


def _stage(problem: Problem, kinds: Sequence[str], edge: tuple[int, int], member: KnownMember) -> Stage:
    """Return a stage of units ``[first, end)``, with the kinds before, of and behind it."""
    before, own, behind = kinds
    (first, end), samples = edge, member.micro_batch_samples
    times = [seconds_at(unit.seconds[own], samples) for unit in problem.units[first:end]]

    def arrives_s(other: str, unit: int) -> float:
        return problem.link(other, own).seconds(samples * problem.units[unit].boundary_bytes)

    return Stage(
        kind=own,
        first_unit=first,
        last_unit=end - 1,
        forward_s=sum(forward_s for forward_s, _ in times),
        backward_s=sum(backward_s for _, backward_s in times),
        input_s=arrives_s(before, first - 1) if first else 0.0,
        gradient_s=arrives_s(behind, end - 1) if end < len(problem.units) else 0.0,
        memory_bytes=0,
    )


def _sharded(problem: Problem, member: KnownMember) -> WorkedOut:
    layout, samples = member.layout, member.micro_batch_samples
    parts = [layout.sample_part(samples, shard) for shard in range(layout.shards)]
    sizes = [stop - start for start, stop in parts]
    whole = sum(layout.state_weights)
    ratios = [weight / whole for weight in layout.state_weights]
    ring = collectives(problem, member.kinds)
    times = {kind: DeviceTimes(problem, kind, max(sizes)) for kind in set(member.kinds)}
    curves = {kind: each.overlapped_s(ring, max(ratios)) for kind, each in times.items()}
    pass_s = max(float(curves[kind][size]) for kind, size in zip(member.kinds, sizes, strict=True))
    shards = tuple(
        Shard(kind=kind, state_ratio=ratio, share_samples=size, micro_batch_samples=size, memory_bytes=0)
        for kind, ratio, size in zip(member.kinds, ratios, sizes, strict=True)
    )
    found = Layout(kind=layout.kind, shards=shards)
    update_s = update_seconds(problem, found)
    return WorkedOut(
        layout=found,
        micro_batch_samples=samples,
        gap_ratio=0.0,
        roomy_slowest_s=pass_s,
        update_s=update_s,
        curve=curve_of(pass_s / samples, update_s),
    )
