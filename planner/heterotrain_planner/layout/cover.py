"""Members for a job: which devices form one, how they are cut, and the division of the global batch among them.

Modes compare on the same footing: a device that holds the whole model is a pipeline of one stage, and sharded members
join as further templates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from heterotrain_core.contract.owners import MOST_OWNER_GROUPS, owner_groups
from heterotrain_core.contract.plan import Binding, LayoutKind, Prediction
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember

from heterotrain_planner.layout.costs import Ints
from heterotrain_planner.layout.equal_members import equal_members
from heterotrain_planner.layout.exchange import shortest_exchange
from heterotrain_planner.layout.level import FINE, Search, TemplateOptions, template_options
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Cover, DeviceLayout, NoLayout, Template
from heterotrain_planner.layout.rough_cover import (
    NEAR,
    NOTICED_EXCHANGE,
    RoughCover,
    exchange_and_update,
    rough_cover,
    rough_covers,
)
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from heterotrain_planner.layout.worked_out import WorkedOut, work_out

EVERY_KIND = frozenset(LayoutKind)
NOTICED_LOSS = 0.1
"""Part of a member's time from which on a loss counts as its limit."""
MOST_FINALISTS = 2
"""Choices of templates that are worked out, the best by the formula."""
_MOST_SHOWN = 4
"""Different layouts in a reason."""
_MOST_SPLITS = 64
"""Global batches, padded further and further, that are tried where sizes of micro-batches differ."""


def cover(
    templates: TemplateTable,
    *,
    devices: Sequence[int] | None = None,
    kinds: frozenset[LayoutKind] = EVERY_KIND,
    further: Sequence[Template] = (),
) -> Cover | NoLayout:
    """Return the members with the shortest predicted step.

    The templates are chosen by the formula ``fill + (n − 1) · slowest stage``. Members are
    then cut for their share, their schedules simulated, and the batch divided by the simulated times. Where the
    exchange is noticed, covers with longer pipelines and equal members with one cut compete as well; the shortest
    predicted step wins.

    Args:
        templates: those of the job.
        devices: by kind, at most those of the table; ``None`` for all of them.
        kinds: layouts that members may have.
        further: templates that are not pipelines, such as sharded members.
    """
    counts = [kind.count for kind in templates.problem.kinds]
    left = counts if devices is None else [max(0, min(pair)) for pair in zip(devices, counts, strict=True)]
    first = rough_cover(templates, left, template_options(templates, further, kinds, 1))
    if first is None:
        return _too_few(templates, left, kinds, further)
    exchange_s = first.step_s - first.level.level_s
    tried = rough_covers(templates, left, kinds, further, first=first)
    each_once = {frozenset(each.level.amounts.items()): each for each in tried}
    wholes = sorted(each_once.values(), key=lambda each: each.step_s)
    near = [each for each in wholes[:MOST_FINALISTS] if each.step_s <= NEAR * wholes[0].step_s]
    results = [_worked_out(templates, left, each) for each in near]
    for each in wholes[len(near) :]:  # where the best choices need too many groups of owners
        if not all(isinstance(result, NoLayout) for result in results):
            break
        results.append(_worked_out(templates, left, each))
    covers = [each for each in results if isinstance(each, Cover)]
    found = min(covers, key=lambda each: each.step_s) if covers else results[0]
    if exchange_s > NOTICED_EXCHANGE * first.step_s or isinstance(found, NoLayout):
        found = _alike(templates, left, first, found)
    return found


def _alike(
    templates: TemplateTable, left: Sequence[int], rough: RoughCover, known: Cover | NoLayout
) -> Cover | NoLayout:
    """Return equal members with one cut where their step is shorter than that of known members."""
    step_s = known.step_s if isinstance(known, Cover) else math.inf
    found = equal_members(templates, rough.options, np.array(left, dtype=np.int64), step_s)
    if found is None:
        return known
    if owner_groups([found.choice.layout.planned] * len(found.micro_batches)) > MOST_OWNER_GROUPS:
        return known
    taken = [(found.choice, count) for count in found.micro_batches]
    return result_of(templates, left, taken, found.padding_samples)


def _worked_out(templates: TemplateTable, left: Sequence[int], rough: RoughCover) -> Cover | NoLayout:
    """Return the cover with cuts, simulated schedules and shares."""
    level = rough.level
    fine = rough.search.whole(rough.least_s, FINE, level)
    # A lower level may be one of more members, whose exchange outweighs it.
    if (
        fine is not None
        and fine.level_s + exchange_and_update(templates.problem, rough.options, fine.amounts) <= rough.step_s
    ):
        level = fine
    amounts = level.amounts
    row_J = rough.options.samples(level.level_s)[1]
    count_BJ = rough.options.micro_batches(level.level_s)
    choices = {
        column: work_out(templates, rough.options, int(row_J[column]), column, int(count_BJ[row_J[column], column]))
        for column in amounts
    }
    divided = divide(templates.problem, choices, [column for column in sorted(amounts) for _ in range(amounts[column])])
    if isinstance(divided, NoLayout):
        return divided
    kept, micro_batches, padding = divided
    groups = owner_groups([choices[column].layout.planned for column in kept])
    if groups > MOST_OWNER_GROUPS:
        return NoLayout(
            reason=f"the members that fit hold the model in parts with {groups} different groups of owners, and at "
            f"most {MOST_OWNER_GROUPS} can exchange gradients: allow other layouts, or use fewer devices"
        )
    taken = [(choices[column], count) for column, count in zip(kept, micro_batches, strict=True)]
    return result_of(templates, left, taken, padding)


def _too_few(
    templates: TemplateTable, left: Sequence[int], kinds: frozenset[LayoutKind], further: Sequence[Template]
) -> NoLayout:
    """Return why these devices form too few members."""
    options = template_options(templates, further, kinds, 1)
    members, used_K = Search(options, np.array(left, dtype=np.int64), 0).most_members()
    problem = templates.problem
    if members:
        return NoLayout(
            reason=f"these devices form {members} {'member' if members == 1 else 'members'} and least_members is "
            f"{problem.least_members}; {_lacking(problem, options, np.array(left) - used_K)}: add devices, or accept "
            "fewer members"
        )
    counted = tuple(replace(kind, count=count) for kind, count in zip(problem.kinds, left, strict=True))
    if not (
        np.isfinite(templates.fill_BU).any(axis=0) & (templates.family.counts_UK <= np.array(left)).all(axis=1)
    ).any():
        fewer = template_table(replace(problem, kinds=counted))
        if isinstance(fewer, NoLayout):
            return fewer
    names = " or ".join(sorted(kind.value.lower() for kind in kinds))
    return NoLayout(reason=f"the model fits on these devices, but no {names} layout does: allow other layouts")


def _lacking(problem: Problem, options: TemplateOptions, unused_K: Ints) -> str:
    """Return which devices a further member lacks, the fewest, in a clause."""
    possible = np.flatnonzero(np.isfinite(options.first_BJ).any(axis=0))
    lacking_JK = np.maximum(0, options.need_JK[possible] - unused_K)
    if not len(possible) or not (fewest := int(lacking_JK.sum(axis=1).min())):
        return "a further member lacks samples of the batch"
    least_K = lacking_JK[int(np.argmax(lacking_JK.sum(axis=1) == fewest))].tolist()
    names = [f"{number} {kind.name}" for number, kind in zip(least_K, problem.kinds, strict=True) if number]
    return f"a further member lacks {' and '.join(names)}"


def divide(
    problem: Problem, choices: Mapping[int, WorkedOut], columns: Sequence[int]
) -> tuple[list[int], list[int], int] | NoLayout:
    """Return the columns of the members that take part, their micro-batches, and the samples of weight zero.

    The shares of the split are whole micro-batches. Where the batch is not a multiple of them, it is padded.
    """
    kept = sorted(columns, key=lambda column: (choices[column].curve.per_sample_s, column))
    members = [
        SplitMember(
            compute=choices[column].curve,
            floor_samples=choices[column].micro_batch_samples,
            cap_samples=choices[column].most_micro_batches * choices[column].micro_batch_samples,
            granularity_samples=choices[column].micro_batch_samples,
        )
        for column in kept
    ]
    sizes = [member.granularity_samples for member in members]
    unit = math.gcd(*sizes)
    first = -(-problem.batch_samples // unit)
    for total in range(
        first * unit, problem.batch_samples + max(sizes), unit * max(1, max(sizes) // unit // _MOST_SPLITS)
    ):
        split = balance(total, members)
        if isinstance(split, Split):
            micro_batches = [share // size for share, size in zip(split.shares, sizes, strict=True)]
            return kept, micro_batches, total - problem.batch_samples
    least = sum(member.floor_samples for member in members)
    return NoLayout(
        reason=f"the global batch of {problem.batch_samples} is too small for {len(kept)} members, which need {least} "
        "samples: take smaller micro-batches, fewer stages, or a larger batch"
    )


def result_of(
    templates: TemplateTable, left: Sequence[int], taken: Sequence[tuple[WorkedOut, int]], padding: int
) -> Cover:
    """Return the cover of members with these templates and numbers of micro-batches, in the best order for rings."""
    problem = templates.problem
    exchange_s, order = shortest_exchange(problem, [choice.layout for choice, _ in taken])
    taken = [taken[index] for index in order]
    padded = max(range(len(taken)), key=lambda i: (taken[i][0].micro_batch_samples, taken[i][1]))
    seconds = {(id(choice), count): choice.seconds(count) for choice, count in taken}
    members = tuple(
        choice.layout.member(
            index,
            count * choice.micro_batch_samples - (padding if index == padded else 0),
            choice.micro_batch_samples,
            choice.time_of(count, seconds[id(choice), count]),
            cap_samples=_cap_samples(problem, choice),
        )
        for index, (choice, count) in enumerate(taken)
    )
    layouts = tuple(choice.layout for choice, _ in taken)
    step_s = max(seconds.values()) + exchange_s
    bindings = tuple(_binding(choice, count, seconds[id(choice), count]) for choice, count in taken)
    used = sum((Counter(layout.devices) for layout in layouts), Counter[str]())
    unused = {kind.name: count - used[kind.name] for kind, count in zip(problem.kinds, left, strict=True)}
    return Cover(
        members=members,
        layouts=layouts,
        unused={name: count for name, count in unused.items() if count},
        prediction=Prediction(
            step_s=step_s,
            efficiency=min(1.0, problem.batch_samples / step_s / templates.flow_per_s(left)),
            efficiency_ceiling=1.0,
            bindings=bindings,
        ),
        exchange_s=exchange_s,
        reason=_sentence(layouts, bindings, problem.batch_samples, step_s),
    )


def _cap_samples(problem: Problem, choice: WorkedOut) -> int | None:
    """Return the samples beyond which a member's stages would keep more than fits; ``None`` for the whole batch."""
    most = choice.most_micro_batches * choice.micro_batch_samples
    return most if most < problem.batch_samples else None


def _binding(choice: WorkedOut, micro_batches: int, seconds: float) -> Binding:
    """Return what costs a member most of its time, apart from the computing of its slowest stage."""
    if not choice.layout.stages:
        return Binding.COMPUTE
    slowest = max(choice.layout.stages, key=lambda stage: stage.busy_s)
    losses = {
        Binding.COMMUNICATION: micro_batches * (slowest.input_s + slowest.gradient_s),
        Binding.FILL: seconds - choice.update_s - micro_batches * slowest.busy_s,
        Binding.MEMORY: micro_batches * (slowest.busy_s - choice.roomy_slowest_s),
    }
    worst = max(losses, key=lambda each: losses[each])
    return worst if losses[worst] >= NOTICED_LOSS * seconds else Binding.COMPUTE


def _sentence(layouts: Sequence[DeviceLayout], bindings: Sequence[Binding], samples: int, step_s: float) -> str:
    shapes = Counter(map(drawing, layouts))
    shown = [f"{count} × {shape}" if count > 1 else shape for shape, count in shapes.most_common(_MOST_SHOWN)]
    more = [f"{len(shapes) - _MOST_SHOWN} other layouts"] if len(shapes) > _MOST_SHOWN else []
    by_limit = ", ".join(f"{each.value.lower()} {bindings.count(each)}" for each in Binding if each in bindings)
    number = "1 member" if len(layouts) == 1 else f"{len(layouts)} members"
    takes = "takes" if len(layouts) == 1 else "take"
    return f"{number} {takes} {samples} samples in {step_s:.4g} s: {', '.join([*shown, *more])}; limited by {by_limit}"


def drawing(layout: DeviceLayout) -> str:
    """Return a layout for people, such as ``[a100: units 0-17 | t4: 18-23 twice]``: these are computed again."""
    if layout.shards:
        return "[" + " + ".join(f"{shard.kind}: {shard.state_ratio:.0%}" for shard in layout.shards) + "]"
    places = [
        f"{stage.kind}: {stage.first_unit}-{stage.last_unit}{' twice' if stage.recomputes else ''}"
        for stage in layout.stages
    ]
    return "[" + " | ".join(places).replace(": ", ": units ", 1) + "]"
