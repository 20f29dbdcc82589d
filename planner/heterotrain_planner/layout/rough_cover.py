"""Choices of templates for members, by the formula of their steps, before any layout is worked out.

The most samples within a time may come with a long exchange. So where that is noticed, longer pipelines compete, and
with few devices fewer members, and members that all have the same kinds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from heterotrain_core.contract.plan import LayoutKind

from heterotrain_planner.layout.exchange import least_exchange, rough_exchange
from heterotrain_planner.layout.level import MOST_MEMBERS, ROUGH, Level, Search, TemplateOptions, template_options
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Template
from heterotrain_planner.layout.template_table import TemplateTable
from heterotrain_planner.layout.update import rough_update

NOTICED_EXCHANGE = 0.005
"""Part of a step from which on the exchange decides about the number of stages: a device of a pipeline holds, and
exchanges, only its own stage."""
NEAR, NEAR_OF_FEW = 1.005, 1.3
"""Step of such a choice over the shortest one by the formula, at most; with few devices, whose exchanges differ most
from those of equal parts."""
FEW_DEVICES = 16
MOST_ALIKE = 15
"""Sets of kinds that all members have, as far as few devices are looked at more closely."""
FEWER_MEMBERS = (1, 2, 3, 4, 6, 8, 12)
"""Most members that are tried there."""


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
    near_ratio: float,
) -> Iterable[RoughCover]:
    """Return the first choice of templates, and others with less exchange where that is noticed."""
    tried: dict[tuple[int, int, tuple[bool, ...]], RoughCover] = {(1, MOST_MEMBERS, ()): first}
    exchange_s = first.step_s - first.level.level_s
    least_exchange_s = least_exchange(templates.problem)

    def try_others(choices: Iterable[tuple[int, int, tuple[bool, ...]]]) -> None:
        for choice in choices:
            stages, most, alike = choice
            if choice not in tried and 1 <= stages <= min(templates.problem.most_stages, sum(left)):
                shortest_s = near_ratio * min(each.step_s for each in tried.values()) - least_exchange_s
                options = first.options if stages == 1 else template_options(templates, further, kinds, stages)
                options = options.of_kinds(alike) if alike else options
                other = rough_cover(
                    templates, left, options, guess_s=first.least_s, shortest_s=shortest_s, most_members=most
                )
                tried.update({} if other is None else {choice: other})

    if exchange_s > NOTICED_EXCHANGE * first.step_s:
        if LayoutKind.PIPELINE in kinds:
            # By factors of two first, then on either side of the best.
            try_others((stages, MOST_MEMBERS, ()) for stages in (2, 4, 8, 16, 32, 64))
            best = min(tried, key=lambda choice: tried[choice].step_s)[0]
            try_others((stages, MOST_MEMBERS, ()) for stages in (best * 3 // 4, best * 3 // 2) if stages > 1)
        if sum(left) <= FEW_DEVICES:
            # Fewer members exchange less, and those with the same kinds among devices of one kind.
            members = sum(first.level.amounts.values())
            fewer = [most for most in FEWER_MEMBERS if templates.problem.least_members <= most < members]
            try_others((1, most, ()) for most in fewer)
            alike = [each for each in itertools.product((False, True), repeat=len(left)) if any(each)]
            try_others((1, most, each) for each in alike[:MOST_ALIKE] for most in (MOST_MEMBERS, *fewer))
    return tried.values()


def rough_cover(
    templates: TemplateTable,
    left: Sequence[int],
    options: TemplateOptions,
    *,
    guess_s: float = 0.0,
    shortest_s: float = math.inf,
    most_members: int = MOST_MEMBERS,
) -> RoughCover | None:
    """Return the whole members with the shortest step by the formula; ``None`` where none is shorter than another's.

    Args:
        templates: the templates.
        left: devices by kind.
        options: templates that members may have.
        guess_s: about the step of members in parts.
        shortest_s: time before the exchange that members have to stay below.
        most_members: that there may be.
    """
    search = Search(options, np.array(left, dtype=np.int64), templates.problem.least_members, most_members)
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
