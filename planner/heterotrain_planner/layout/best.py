"""The fastest cover among those that allow some kinds of layouts, or fewer of them.

``best_cover`` compares them for templates that exist. ``best_members`` answers a whole question of a job: it adds the
sharded members where the problem allows them, also those of models no pipeline of whole units can hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.contract.owners import MOST_OWNER_GROUPS, owner_groups
from heterotrain_core.contract.plan import Binding, LayoutKind, Prediction

from heterotrain_planner.layout.cover import cover, result_of
from heterotrain_planner.layout.level import TemplateOptions, template_options
from heterotrain_planner.layout.local_search import LocalSearch
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Cover, NoLayout, Template
from heterotrain_planner.layout.rough_cover import FEW_DEVICES
from heterotrain_planner.layout.sharded import sharded_templates
from heterotrain_planner.layout.template_table import TemplateTable
from heterotrain_planner.layout.update import update_seconds
from heterotrain_planner.layout.worked_out import curve_of

TIE = 1e-6
"""Relative difference of rates below which fewer kinds of layouts are better."""
_CHOICES = (
    frozenset({LayoutKind.REPLICATED}),
    frozenset({LayoutKind.REPLICATED, LayoutKind.SHARDED}),
    frozenset({LayoutKind.REPLICATED, LayoutKind.PIPELINE}),
    frozenset(LayoutKind),
)
"""A member of one device is always possible."""


def best_cover(
    templates: TemplateTable,
    kinds: frozenset[LayoutKind],
    *,
    devices: Sequence[int] | None = None,
    further: Sequence[Template] = (),
) -> Cover | NoLayout:
    """Return the fastest members whose layouts are of these kinds, or why there are none.

    ``cover`` chooses templates before it knows their exchange exactly. So the kinds are compared with fewer of them,
    and fewer win a tie.

    Args:
        templates: those of the job.
        kinds: layouts that members may have; replicated ones always belong to them.
        devices: as in ``cover``.
        further: templates of sharded members, where these are allowed.
    """
    found = [
        cover(templates, devices=devices, kinds=each, further=further if LayoutKind.SHARDED in each else ())
        for each in _CHOICES
        if each <= kinds
    ]
    covers = [each for each in found if isinstance(each, Cover)]
    if not covers:
        return found[-1]
    best = max(covers, key=lambda each: each.samples_per_s * (1 - TIE * found.index(each)))
    left = [kind.count for kind in templates.problem.kinds]
    left = left if devices is None else [max(0, min(pair)) for pair in zip(devices, left, strict=True)]
    return (
        _improved(templates, left, template_options(templates, further, kinds, 1), covers, best)
        if sum(left) <= FEW_DEVICES
        else best
    )


def _improved(
    templates: TemplateTable, left: Sequence[int], options: TemplateOptions, known: Sequence[Cover], best: Cover
) -> Cover:
    """Return members with a shorter step that a local search finds, or the best known ones."""
    search = LocalSearch(templates, options, left)
    found = search.best([search.choices(each) for each in known], best.step_s)
    if found is None:
        return best
    _, members, counts = found
    taken = [(search.worked_out(member, count), count) for member, count in zip(members, counts, strict=True)]
    if owner_groups([choice.layout.planned for choice, _ in taken]) > MOST_OWNER_GROUPS:
        return best
    padding = sum(choice.micro_batch_samples * count for choice, count in taken) - templates.problem.batch_samples
    return result_of(templates, left, taken, padding)


def allowed_kinds(problem: Problem) -> frozenset[LayoutKind]:
    """Return the layouts that members may have."""
    cut = {LayoutKind.PIPELINE} if problem.may_cut else set()
    divided = {LayoutKind.SHARDED} if problem.may_shard else set()
    return frozenset({LayoutKind.REPLICATED} | cut | divided)


def shards_of(problem: Problem) -> tuple[Template, ...]:
    """Return the sharded members that fit, where the problem allows them: with shares by speed and state by memory."""
    return sharded_templates(problem, equal_shards=False) if problem.may_shard else ()


def best_members(templates: TemplateTable | NoLayout, problem: Problem) -> Cover | NoLayout:
    """Return the fastest members of a problem's devices, of the layouts that it allows, or why there are none.

    Args:
        templates: of pipelines of at least these devices, or why there is none: a sharded member may fit then.
        problem: the question.
    """
    further = shards_of(problem)
    if isinstance(templates, NoLayout):
        return _one_member(problem, further, templates)
    return best_cover(
        templates, allowed_kinds(problem), devices=[kind.count for kind in problem.kinds], further=further
    )


def _one_member(problem: Problem, templates: Sequence[Template], reason: NoLayout) -> Cover | NoLayout:
    """Return the fastest single member out of templates, with the whole batch; ``reason`` where there is none."""
    if problem.least_members > 1 or not templates:
        return reason

    def step_s(template: Template) -> float:
        passes_s = template.first_s + (_passes(problem, template) - 1) * template.next_s
        return passes_s + update_seconds(problem, template.layout)

    best = min(templates, key=step_s)
    step, counts = step_s(best), [kind.count for kind in problem.kinds]
    size = best.micro_batch_samples
    compute = curve_of(best.next_s / size, best.first_s - best.next_s + update_seconds(problem, best.layout))
    left = {kind.name: count - used for kind, count, used in zip(problem.kinds, counts, best.devices, strict=True)}
    return Cover(
        members=(best.layout.member(0, problem.batch_samples, size, compute),),
        layouts=(best.layout,),
        unused={name: count for name, count in left.items() if count},
        prediction=Prediction(
            step_s=step,
            efficiency=min(1.0, problem.batch_samples / step / _flow_per_s(problem)),
            efficiency_ceiling=1.0,
            bindings=(Binding.MEMORY,),
        ),
        exchange_s=0.0,
        reason=f"no device or pipeline holds the model's units whole, so {sum(best.devices)} devices divide them in a "
        f"step of {step:.4g} s",
    )


def _flow_per_s(problem: Problem) -> float:
    """Return the rate of all devices if each computed its largest measured micro-batch all the time."""
    rate = 0.0
    for kind in problem.kinds:
        last = [unit.seconds[kind.name][-1] for unit in problem.units]
        seconds = sum((each.forward_s + each.backward_s) / each.micro_batch_samples for each in last)
        rate += kind.count / seconds if seconds else 0.0
    return rate or 1.0


def _passes(problem: Problem, template: Template) -> int:
    return -(-problem.batch_samples // template.micro_batch_samples)
