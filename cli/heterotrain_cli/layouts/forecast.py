"""What fits where, how fast, at what price, and what one more device of each kind would bring. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heterotrain_core.contract.plan import Binding, LayoutKind, Member
from heterotrain_planner.layout.best import best_cover, best_members
from heterotrain_planner.layout.problem import Problem, invalid
from heterotrain_planner.layout.result import Cover, DeviceLayout, NoLayout, Template
from heterotrain_planner.layout.sharded import sharded_templates
from heterotrain_planner.layout.step_bound import least_step
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from heterotrain_planner.perf.model import compute_s

from heterotrain_cli.errors import InputError

AUTO = "auto"
SHARDED = "sharded"
ACROSS_WORKERS = "across-workers"
MODES = ("data", SHARDED, ACROSS_WORKERS, "pipeline", AUTO)
"""What ``spec.parallelism.mode`` allows; ``across-workers`` is ``ShardedAcrossWorkers``.

A member of one device is always possible. ``auto`` is the fastest of the others, and of members of several workers
some of which are sharded and others cut into stages.
"""
EVEN_RATIO = 1.01
"""Largest over smallest part of the state of shards that are drawn as even ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMore:
    """The rate with one more device of a kind.

    Attributes:
        kind: of the device.
        samples_per_s: ``None`` where the model does not fit even then.
    """

    kind: str
    samples_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutForecast:
    """The answer for one model and batch.

    Attributes:
        problem: the question.
        found: the members, or why there are none.
        least_s: seconds that no step of the mode falls below; ``None`` where no pipeline holds the model.
        by_mode: samples per second of each mode alone; ``None`` where the model does not fit.
        one_more: by kind, in the order of the problem.
    """

    problem: Problem
    found: Cover | NoLayout
    least_s: float | None
    by_mode: Mapping[str, float | None]
    one_more: tuple[OneMore, ...]

    @property
    def price_per_hour(self) -> float:
        """The price of the devices in use."""
        if isinstance(self.found, NoLayout):
            return 0.0
        prices = {kind.name: kind.price_per_hour for kind in self.problem.kinds}
        return sum(prices[name] * count for layout in self.found.layouts for name, count in layout.devices.items())


def forecast_layout(problem: Problem, *, mode: str = AUTO) -> LayoutForecast:
    """Return the forecast.

    Args:
        problem: the model, the devices and the batch.
        mode: one of ``MODES``.

    Raises:
        InputError: the problem is unsound.
    """
    if clause := invalid(problem):
        raise InputError(clause)
    templates = template_table(problem)
    by_mode = _by_mode(templates, problem)
    found = _auto(templates, problem, by_mode) if mode == AUTO else by_mode[mode]
    more = [
        OneMore(kind=kind.name, samples_per_s=_rate(best(_with_one_more(problem, index), mode)))
        for index, kind in enumerate(problem.kinds)
    ]
    rates = {name: _rate(cover) for name, cover in by_mode.items()}
    least_s = _least(templates, found, mode)
    return LayoutForecast(problem=problem, found=found, least_s=least_s, by_mode=rates, one_more=tuple(more))


def _least(templates: TemplateTable | NoLayout, found: Cover | NoLayout, mode: str) -> float | None:
    if isinstance(templates, NoLayout) or isinstance(found, NoLayout):
        return None
    shards = {LayoutKind.SHARDED} if mode in {SHARDED, ACROSS_WORKERS, AUTO} else set()
    stages = {LayoutKind.PIPELINE} if mode in {"pipeline", AUTO} else set()
    devices = [kind.count for kind in templates.problem.kinds]
    return least_step(templates, devices, frozenset(shards | stages), known_s=found.step_s)


def best(problem: Problem, mode: str) -> Cover | NoLayout:
    """Return the fastest members of a mode, or why there are none."""
    templates = template_table(problem)
    return _auto(templates, problem, _by_mode(templates, problem)) if mode == AUTO else _best(templates, problem, mode)


def _by_mode(templates: TemplateTable | NoLayout, problem: Problem) -> dict[str, Cover | NoLayout]:
    return {mode: _best(templates, problem, mode) for mode in MODES if mode != AUTO}


def _auto(
    templates: TemplateTable | NoLayout, problem: Problem, by_mode: Mapping[str, Cover | NoLayout]
) -> Cover | NoLayout:
    found = [*by_mode.values(), best_members(templates, replace(problem, may_shard=True, reduces_late=True))]
    covers = [each for each in found if isinstance(each, Cover)]
    # Without any, the reason names the devices that pipelines would need.
    return max(covers, key=lambda cover: cover.samples_per_s, default=by_mode["pipeline"])


def _best(templates: TemplateTable | NoLayout, problem: Problem, mode: str) -> Cover | NoLayout:
    if mode == ACROSS_WORKERS:
        return best_members(templates, replace(problem, may_cut=False, may_shard=True, reduces_late=True))
    if isinstance(templates, NoLayout):
        return templates
    if mode == SHARDED:
        shards = tuple(each for each in sharded_templates(problem) if _is_one_worker(problem, each))
        return best_cover(templates, frozenset({LayoutKind.REPLICATED, LayoutKind.SHARDED}), further=shards)
    stages = {LayoutKind.PIPELINE} if mode == "pipeline" else set()
    return best_cover(templates, frozenset({LayoutKind.REPLICATED} | stages))


def _is_one_worker(problem: Problem, template: Template) -> bool:
    """Return whether a sharded member is what a job can have: all devices of one node."""
    used = [(count, kind) for count, kind in zip(template.devices, problem.kinds, strict=True) if count]
    return len(used) == 1 and used[0][0] == used[0][1].devices_per_node


def draw(layout: DeviceLayout) -> str:
    """Return a layout on one line: ``a100: units 0-17 | t4: 18-23`` or ``a100: 71% + t4: 29% of all units``."""
    if layout.stages:
        single = len(layout.stages) == 1
        stages = [
            f"{stage.kind}: {'all' if single else _range(stage.first_unit, stage.last_unit)}" for stage in layout.stages
        ]
        return " | ".join(stages)
    parts = [shard.state_ratio for shard in layout.shards]
    if max(parts) > EVEN_RATIO * min(parts):
        return " + ".join(f"{shard.kind}: {shard.state_ratio:.0%}" for shard in layout.shards) + " of all units"
    return " + ".join(f"{count} {kind}" for kind, count in layout.devices.items()) + ": sharded"


def as_document(found: LayoutForecast) -> dict[str, Any]:
    """Return the forecast as a JSON document."""
    answer = found.found
    more = [{"kind": each.kind, "samplesPerSecond": each.samples_per_s} for each in found.one_more]
    common = {"batch": found.problem.batch_samples, "samplesPerSecondByMode": dict(found.by_mode), "oneMore": more}
    if isinstance(answer, NoLayout):
        return {
            "feasible": False, "reason": answer.reason, "neededBytes": answer.needed_bytes,
            "availableBytes": answer.available_bytes, "fittingUnits": answer.fitting_units, **common,
        }  # fmt: skip
    return {
        "feasible": True, "stepSeconds": answer.step_s, "samplesPerSecond": answer.samples_per_s,
        "exchangeSeconds": answer.exchange_s,
        "provedLeastSeconds": found.least_s,
        "partOfFlowBound": answer.prediction.efficiency, "pricePerHour": found.price_per_hour,
        "members": [*map(_member, answer.members, answer.layouts, answer.prediction.bindings)],
        "unused": {name: count for name, count in answer.unused.items() if count}, **common,
    }  # fmt: skip


def _member(member: Member, layout: DeviceLayout, binding: Binding) -> dict[str, Any]:
    count = member.micro_batches
    return {
        "kind": layout.kind.value, "shareSamples": member.share_samples,
        "microBatchSamples": member.micro_batch_samples, "microBatches": count,
        "computeSeconds": member.compute and compute_s(member.compute, count * member.micro_batch_samples),
        "limit": binding.value,
        "stages": [
            {"kind": stage.kind, "firstUnit": stage.first_unit, "lastUnit": stage.last_unit,
             "busySeconds": stage.busy_s, "memoryBytes": stage.memory_bytes}
            for stage in layout.stages
        ],
        "shards": [
            {"kind": shard.kind, "stateRatio": shard.state_ratio, "shareSamples": shard.share_samples,
             "memoryBytes": shard.memory_bytes}
            for shard in layout.shards
        ],
    }  # fmt: skip


def _with_one_more(problem: Problem, index: int) -> Problem:
    kinds: Sequence[Any] = problem.kinds
    more = replace(kinds[index], count=kinds[index].count + 1)
    return replace(problem, kinds=(*kinds[:index], more, *kinds[index + 1 :]))


def _rate(found: Cover | NoLayout) -> float | None:
    return None if isinstance(found, NoLayout) else found.samples_per_s


def _range(first: int, last: int) -> str:
    return f"unit {first}" if first == last else f"units {first}-{last}"
