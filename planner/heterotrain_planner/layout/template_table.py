"""The table of templates: every multiset's best pipeline for every size of micro-batch.

It is made once for a model and its kinds of devices. Covers of any of its devices are look-ups, so a loss needs no new
search.

Legend: ``B`` sizes of micro-batches, ``U`` multisets, ``K`` kinds, ``E`` edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterotrain_planner.layout.best_pipelines import BestPipelines, best_pipelines
from heterotrain_planner.layout.costs import Costs, Floats, Ints, costs_of
from heterotrain_planner.layout.cut import memory_reach
from heterotrain_planner.layout.family import Multisets, family_of
from heterotrain_planner.layout.problem import Problem, invalid
from heterotrain_planner.layout.result import NoLayout

FEW_DEVICES = 8
"""Devices up to which members with fewer micro-batches than stages have templates of their own. They keep fewer."""
FEW_MICRO_BATCHES = (1, 2, 3, 4, 6)
"""Most micro-batches of such members."""
MOST_WORK = 300_000_000
"""Steps of the passes for all sizes of micro-batch: about a second."""
LEAST_ENTRIES, MOST_ENTRIES = 256, 20_000
"""Pairs of a multiset and one of its kinds that are searched, however large or small the effort for each one is."""
_MOST_ADDED = 64
"""Devices that a remedy may name; beyond that, it names a smaller model."""
_GIB = 1024.0**3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TemplateTable:
    """Templates by multiset and size of micro-batch.

    Attributes:
        problem: what the table is for.
        costs: by size of micro-batch, in the order of ``Problem.micro_batches``; then those of shares of few of them,
            where memory permits other pipelines then.
        family: the multisets.
        slowest_BU: seconds of the slowest stage, least possible; infinite where nothing fits in memory.
        fill_BU: seconds of all stages of such a pipeline.
        flow_K: value of a device of each kind, so that no members together exceed ``flow_K`` times the devices in
            samples per second, whatever their layouts.
        complete: whether the family has all multisets of at most ``Problem.most_stages`` devices.
    """

    problem: Problem
    costs: tuple[Costs, ...]
    family: Multisets
    slowest_BU: Floats
    fill_BU: Floats
    flow_K: Floats
    complete: bool

    def flow_per_s(self, devices: Sequence[int]) -> float:
        """Return samples per second that no layouts of these devices exceed: all compute all the time, no links."""
        return float(self.flow_K @ np.array(devices, dtype=float))


def template_table(problem: Problem) -> TemplateTable | NoLayout:
    """Return the templates of a problem, or why no pipeline of its devices can hold the model."""
    if clause := invalid(problem):
        return NoLayout(reason=clause)
    costs = tuple(costs_of(problem, size) for size in problem.micro_batches)
    classes, edges = costs[0].receive_CE.shape
    work = len(costs) * classes * classes * edges * edges // 2
    counts = [kind.count for kind in problem.kinds]
    stages = min(problem.most_stages, edges - 1)
    family = family_of(
        counts, most_stages=stages, most_entries=min(MOST_ENTRIES, max(LEAST_ENTRIES, MOST_WORK // work))
    )
    found = [best_pipelines(each, family) for each in costs]
    longest = min(stages, sum(counts))
    if sum(counts) <= FEW_DEVICES:
        more = _with_few_micro_batches(problem, costs, family, found, longest)
        costs += tuple(own for own, _ in more)
        found += [each for _, each in more]
    slowest_BU = np.array([each.slowest_U for each in found])
    present = sum(1 for count in counts if count)
    templates = TemplateTable(
        problem=problem,
        costs=costs,
        family=family,
        slowest_BU=slowest_BU,
        fill_BU=np.array([each.fill_U for each in found]),
        flow_K=_flow(costs),
        complete=len(family.most_by_kinds) == min(present, longest) and set(family.most_by_kinds) == {longest},
    )
    return templates if np.isfinite(slowest_BU).any() else does_not_fit(templates)


def _with_few_micro_batches(
    problem: Problem, costs: Sequence[Costs], family: Multisets, known: Sequence[BestPipelines], longest: int
) -> list[tuple[Costs, BestPipelines]]:
    """Return pipelines of at most so many stages whose members may have few micro-batches, where these are others."""
    more = []
    for each, found in zip(costs, known, strict=True):
        for most in [most for most in FEW_MICRO_BATCHES if most < min(longest, each.micro_batches)]:
            own = costs_of(problem, each.micro_batch_samples, most)
            table = best_pipelines(own, family)
            if np.array_equal(table.slowest_U, found.slowest_U):
                break  # memory for activations is no limit
            more.append((own, table))
    return more


def does_not_fit(templates: TemplateTable) -> NoLayout:
    """Return why no pipeline of the table's devices holds the whole model."""
    problem = templates.problem
    costs = min(templates.costs, key=lambda each: each.micro_batch_samples)
    size = costs.micro_batch_samples
    edges = len(costs.unit_E) - 1
    reached = memory_reach(costs, templates.family)
    best = int(np.argmax(reached))
    needed = math.ceil(float(costs.state_E[-1] + costs.activation_E[-1]))
    available = sum(kind.count * kind.memory_bytes for kind in problem.kinds)
    held = len(problem.units) - int(costs.unit_E[edges - reached[best]])
    what = (
        f"the model needs {_gib(needed)} of training state and activations with micro-batches of {size}, and the "
        f"devices have {_gib(available)}"
    )
    if blocked := _blocked(problem, costs):
        return NoLayout(reason=blocked, needed_bytes=needed, available_bytes=available, fitting_units=held)
    limit = "" if templates.complete else " The search was limited to fewer kinds of devices in one member."
    reason = (
        f"{what}: the pipeline that holds most has {held} of {len(problem.units)} units, on "
        f"{_names(problem, templates.family.counts_UK[best])}. {_remedy(templates, costs, reached)}{limit}"
    )
    return NoLayout(reason=reason, needed_bytes=needed, available_bytes=available, fitting_units=held)


def _blocked(problem: Problem, costs: Costs) -> str | None:
    """Return the sentence about a unit that no device can hold."""
    present = [index for index, kind in enumerate(problem.kinds) if kind.count]
    largest = float(costs.memory_K[present].max())
    need_E = np.diff(costs.state_E) + costs.kept(1) * np.diff(costs.activation_E)
    worst = int(np.argmax(need_E))
    if need_E[worst] <= largest:
        return None
    unit = problem.units[int(costs.unit_E[worst])]
    return (
        f"unit {int(costs.unit_E[worst])} ({unit.name}) alone needs {_gib(float(need_E[worst]))}, more than any device "
        f"has ({_gib(largest)}): cut the model into smaller units or add a kind of device with more memory"
    )


def _remedy(templates: TemplateTable, costs: Costs, reached: Sequence[int]) -> str:
    """Return which further devices would make the model fit, the fewest of one kind."""
    problem = templates.problem
    edges = len(costs.unit_E) - 1
    best: tuple[int, int] | None = None
    sizes = templates.family.counts_UK.sum(axis=1).tolist()
    # By size, the multiset that holds most: further devices go in front of it.
    front: dict[int, int] = {0: 0}
    for units, size in zip(reached, sizes, strict=True):
        front[size] = max(front.get(size, 0), units)
    for kind in range(len(problem.kinds)):
        for position, units in front.items():
            held, added = units, 0
            while held < edges and added < _MOST_ADDED and position + added < problem.most_stages:
                added += 1
                ends = costs.ends(kind, position + added)
                held = edges - int((ends < edges - held).sum())
            if held >= edges and (best is None or added < best[0]):
                best = (added, kind)
    if best is None:
        return (
            f"No number of further devices of one kind helps with at most {problem.most_stages} stages: take smaller "
            "micro-batches, a smaller model, or a larger number of stages."
        )
    added, kind = best
    return f"Add {added} {'device' if added == 1 else 'devices'} of kind {problem.kinds[kind].name}."


def _flow(costs: Sequence[Costs]) -> Floats:
    """Return values of devices for ``TemplateTable.flow_K``.

    Let y_k be any price of a second on kind k. A sample costs at least Σ_u min_k y_k t_ku, and the devices earn Σ_k y_k
    n_k each second; the quotient bounds the rate (duality of linear programming). Prices in proportion to the speed of
    the whole model are the best ones where kinds differ by one factor.
    """
    seconds_KU = np.min(
        [np.diff(each.forward_KE + each.backward_KE, axis=1) / each.micro_batch_samples for each in costs], axis=0
    )
    price_K: Floats = 1.0 / seconds_KU.sum(axis=1)
    value: Floats = price_K / float((price_K[:, None] * seconds_KU).min(axis=0).sum())
    return value


def _names(problem: Problem, counts: Ints) -> str:
    return " and ".join(f"{n} {kind.name}" for kind, n in zip(problem.kinds, counts.tolist(), strict=True) if n)


def _gib(size: float) -> str:
    """Return bytes for people, GiB where that is at least a tenth."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size:.0f} bytes"
