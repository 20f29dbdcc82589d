"""Equal members with the same cut, for jobs whose exchange of gradients is long.

Where all members are cut alike, the owners of every piece are devices of one kind. Gradients then stay inside a pool,
on its links, and only activations pass between pools. Stages that hold equal parts of the gradients exchange them
soonest, stages of equal time compute soonest. So besides the best cuts by time, those with the fastest slowest stage
under a limit for the exchange are tried, from the limit of the most even stages up.

Legend: ``J`` templates, ``B`` sizes of micro-batches, ``K`` kinds, ``E`` edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterotrain_planner.layout.costs import Costs, Floats, Ints
from heterotrain_planner.layout.cut import layout_of
from heterotrain_planner.layout.exchange import exchange_seconds
from heterotrain_planner.layout.level import TemplateOptions
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import DeviceLayout
from heterotrain_planner.layout.template_table import TemplateTable
from heterotrain_planner.layout.worked_out import WorkedOut, work_out

MOST_WORKED_OUT = 3
"""Templates that are worked out, the best by the estimate."""
MOST_LIMITS = 6
"""Limits of the exchange between that of the most even stages and that of the best cut by time."""
MOST_ORDERS = 3
"""Orders of kinds that are cut under such limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualMembers:
    """Equal members.

    Attributes:
        choice: what each member is.
        micro_batches: of each member.
        padding_samples: of weight zero.
        step_s: the longest share by simulation, and the exchange.
    """

    choice: WorkedOut
    micro_batches: tuple[int, ...]
    padding_samples: int
    step_s: float


def equal_members(
    templates: TemplateTable, options: TemplateOptions, left_K: Ints, shorter_than_s: float
) -> EqualMembers | None:
    """Return the equal members with the shortest step, ``None`` where none is shorter than a given one.

    Args:
        templates: the templates.
        options: the templates that members may have.
        left_K: devices by kind.
        shorter_than_s: the step to beat.
    """
    best: EqualMembers | None = None
    for estimate_s, number, row, column in _estimated(templates.problem, options, left_K)[:MOST_WORKED_OUT]:
        limit_s = shorter_than_s if best is None else best.step_s
        if estimate_s >= limit_s:
            break
        found = _worked_out(templates, options, number, row, column)
        if found is not None and found.step_s < limit_s:
            best = found
    return best


def _estimated(problem: Problem, options: TemplateOptions, left_K: Ints) -> list[tuple[float, int, int, int]]:
    """Return (step, members, row, column) of the best size and number of members of each template, best first.

    Each device is taken to hold an equal part of the model, and to exchange it with devices of its own kind.
    """
    whole = float(sum(unit.parameter_bytes for unit in problem.units))
    own = [problem.link(kind.name, kind.name) for kind in problem.kinds]
    latency_K = np.array([link.latency_s for link in own])
    pace_K = np.array([1.0 / link.bytes_per_s for link in own])
    size_J = options.need_JK.sum(axis=1)
    with np.errstate(divide="ignore"):
        most_J = np.min(
            np.where(options.need_JK > 0, left_K // np.maximum(options.need_JK, 1), options.batch_samples), axis=1
        )
    best_J = np.full(len(size_J), np.inf)
    number_J, row_J = np.zeros((2, len(size_J)), dtype=np.int64)
    for number in _numbers(int(most_J.max(initial=0)), most_J, problem.least_members):
        held_J = whole / size_J / number
        rounds_JK = 2 * (number - 1) * (latency_K + held_J[:, None] * pace_K)
        exchange_J = np.where(options.need_JK > 0, rounds_JK, 0.0).max(axis=1)
        total_BJ = -(-options.batch_samples // options.samples_BJ)
        count_BJ = -(-total_BJ // number)
        possible_BJ = (total_BJ >= number) & (most_J >= number) & (count_BJ <= options.most_BJ)
        with np.errstate(invalid="ignore"):
            share_BJ = options.first_BJ + (count_BJ - 1) * options.next_BJ
        step_BJ = np.where(possible_BJ & np.isfinite(options.first_BJ), share_BJ, np.inf)
        step_J = step_BJ.min(axis=0) + exchange_J
        better = step_J < best_J
        best_J[better], number_J[better] = step_J[better], number
        row_J[better] = step_BJ.argmin(axis=0)[better]
    order = np.argsort(best_J)[: 4 * MOST_WORKED_OUT]
    return [(float(best_J[j]), int(number_J[j]), int(row_J[j]), int(j)) for j in order if np.isfinite(best_J[j])]


def _numbers(most: int, most_J: Ints, least: int) -> list[int]:
    """Return numbers of members to try: as many as possible of each template, and powers of two."""
    numbers = {*np.unique(most_J).tolist(), *(2**power for power in range(most.bit_length())), least}
    return sorted(number for number in numbers if least <= number <= most)


def _worked_out(
    templates: TemplateTable, options: TemplateOptions, number: int, row: int, column: int
) -> EqualMembers | None:
    """Return members of one template with the best cut for share and exchange together."""
    problem = templates.problem
    samples = int(options.samples_BJ[row, column])
    total = -(-problem.batch_samples // samples)
    each, more = divmod(total, number)
    most = each + (1 if more else 0)
    choice = work_out(templates, options, row, column, most)
    layouts = [choice.layout, *choice.others]
    if column < options.pipelines and number > 1:
        layouts += _even_layouts(problem, templates.costs[row], layouts, number)
    cuts = [choice.with_layout(problem, layout) for layout in layouts]
    steps = [each.seconds(most) + exchange_seconds(problem, [each.layout] * number) for each in cuts]
    step_s = min(steps)
    return EqualMembers(
        choice=replace(cuts[steps.index(step_s)], others=()),
        micro_batches=(most,) * more + (each,) * (number - more),
        padding_samples=total * samples - problem.batch_samples,
        step_s=step_s,
    )


def _even_layouts(problem: Problem, costs: Costs, known: Sequence[DeviceLayout], number: int) -> list[DeviceLayout]:
    """Return cuts whose stages exchange within limits, from the least possible one to that of the best by time."""
    names = [kind.name for kind in problem.kinds]
    orders = list(dict.fromkeys(tuple(names.index(stage.kind) for stage in layout.stages) for layout in known))
    rounds = 2 * (number - 1)
    links = [problem.link(name, name) for name in names]
    seconds_KE = np.array([rounds * (each.latency_s + costs.parameter_E / number / each.bytes_per_s) for each in links])
    found = []
    for order in orders[:MOST_ORDERS]:
        least = least_slowest(costs, order, seconds_KE)
        if least is None:
            continue
        low_s = max(float(seconds_KE[kind, end] - seconds_KE[kind, edge]) for kind, edge, end in least)
        high_s = max(exchange_seconds(problem, [known[0]] * number), low_s)
        for limit_s in np.geomspace(low_s, high_s, MOST_LIMITS) if low_s > 0 else ():
            stages = least_slowest(costs, order, seconds_KE, float(limit_s) * (1 + 1e-9))
            if stages is not None:
                found.append(layout_of(problem, costs, stages))
    return list(dict.fromkeys(found))


def least_slowest(
    costs: Costs, order: Sequence[int], limited_KE: Floats | None = None, limit: float | None = None
) -> list[tuple[int, int, int]] | None:
    """Return the cut of this order of kinds with the least slowest stage, under a limit for another sum of each.

    Without a limit, the largest sum of a stage is the least one; without sums, only time counts.
    """
    best_E = np.full(len(costs.unit_E), np.inf)
    best_E[-1] = -np.inf
    chosen = []
    for position, kind in enumerate(reversed(order), start=1):
        own_EE = costs.stage_s(kind, position)
        if limited_KE is not None:
            limited_EE = limited_KE[kind][None] - limited_KE[kind][:, None]
            possible_EE = np.isfinite(own_EE) if limit is None else limited_EE <= limit
            own_EE = np.where(possible_EE, limited_EE if limit is None else own_EE, np.inf)
        value_EE = np.maximum(own_EE, best_E[None])
        ends_E = value_EE.argmin(axis=1)
        chosen.append(ends_E)
        best_E = np.take_along_axis(value_EE, ends_E[:, None], axis=1)[:, 0]
    return list(_stages(order, chosen[::-1])) if np.isfinite(best_E[0]) else None


def _stages(order: Sequence[int], chosen: Sequence[Ints]) -> Iterator[tuple[int, int, int]]:
    edge = 0
    for stage, kind in enumerate(order):
        end = int(chosen[stage][edge])
        yield kind, edge, end
        edge = end
