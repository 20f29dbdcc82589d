"""Choices of templates for members, by the formula of their steps, before any layout is worked out.

The most samples within a time may come with a long exchange. So where that is noticed, longer pipelines compete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from heterotrain_core.contract.plan import LayoutKind

from heterotrain_planner.layout.exchange import least_exchange, rough_exchange
from heterotrain_planner.layout.level import ROUGH, Level, Search, TemplateOptions, template_options
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Template
from heterotrain_planner.layout.template_table import TemplateTable
from heterotrain_planner.layout.update import rough_update

NOTICED_EXCHANGE = 0.005
"""Part of a step from which on the exchange decides about the number of stages: a device of a pipeline holds, and
exchanges, only its own stage."""
NEAR = 1.005
"""Step of such a choice over the shortest one by the formula, at most."""
FEW_DEVICES = 16
"""Devices up to which a local search follows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoughCover:
    """A choice of templates before their layouts are worked out.

    Attributes:
        options: the templates.
        search: for members out of them.
        least_s: no members take less before the exchange.
        level: whole members.
        step_s: by the formula, exchange included.
    """

    options: TemplateOptions
    search: Search
    least_s: float
    level: Level
    step_s: float


def rough_covers(
    templates: TemplateTable,
    left: Sequence[int],
    kinds: frozenset[LayoutKind],
    further: Sequence[Template],
    *,
    first: RoughCover,
) -> Iterable[RoughCover]:
    """Return the first choice of templates, and others with less exchange where that is noticed."""
    tried = {1: first}
    least_exchange_s = least_exchange(templates.problem)

    def try_others(choices: Iterable[int]) -> None:
        for stages in choices:
            if stages not in tried and 1 <= stages <= min(templates.problem.most_stages, sum(left)):
                shortest_s = NEAR * min(each.step_s for each in tried.values()) - least_exchange_s
                options = template_options(templates, further, kinds, stages)
                other = rough_cover(templates, left, options, guess_s=first.least_s, shortest_s=shortest_s)
                tried.update({} if other is None else {stages: other})

    if first.step_s - first.level.level_s > NOTICED_EXCHANGE * first.step_s and LayoutKind.PIPELINE in kinds:
        # By factors of two first, then on either side of the best.
        try_others((2, 4, 8, 16, 32, 64))
        best = min(tried, key=lambda stages: tried[stages].step_s)
        try_others(stages for stages in (best * 3 // 4, best * 3 // 2) if stages > 1)
    return tried.values()


def rough_cover(
    templates: TemplateTable,
    left: Sequence[int],
    options: TemplateOptions,
    *,
    guess_s: float = 0.0,
    shortest_s: float = math.inf,
) -> RoughCover | None:
    """Return the whole members with the shortest step by the formula; ``None`` where none is shorter than another's.

    Args:
        templates: the templates.
        left: devices by kind.
        options: templates that members may have.
        guess_s: about the step of members in parts.
        shortest_s: time before the exchange that members have to stay below.
    """
    search = Search(options, np.array(left, dtype=np.int64), templates.problem.least_members)
    least_s = search.relaxed_s(guess_s)
    if least_s is None or least_s >= shortest_s or not search.reaches(shortest_s, ROUGH):
        return None
    level = search.whole(least_s, ROUGH)
    if level is None:
        return None
    step_s = level.level_s + exchange_and_update(templates.problem, options, level.amounts)
    return RoughCover(options=options, search=search, least_s=least_s, level=level, step_s=step_s)


def exchange_and_update(problem: Problem, options: TemplateOptions, amounts: Mapping[int, int]) -> float:
    """Return about the seconds of the exchange between members of these templates, and of the update."""
    members = Counter[tuple[int, ...]]()
    for column, number in amounts.items():
        members[tuple(options.need_JK[column].tolist())] += number
    return rough_exchange(problem, members) + rough_update(problem, members)
