"""Rates of the best layouts of jobs whose members are planned, by devices.

A table is made once for a job's model and limits, and kept from one allocation to the next. Jobs whose workers have not
measured the model yet are valued like other jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from heterotrain_planner.layout.best import allowed_kinds, shards_of
from heterotrain_planner.layout.further_member import lacking_devices
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.rates import LayoutRates
from heterotrain_planner.layout.result import Template
from heterotrain_planner.layout.template_table import TemplateTable, template_table

from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.allocation.demand import Competitor
from heterotrain_operator.decide.objects.pods import members_per_worker, template_of
from heterotrain_operator.decide.plan.layout_problem import problem_of
from heterotrain_operator.decide.plan.memory_limits import known_limits, limited

MOST_DEVICES = 64
"""Devices of a kind that are told apart: further ones count as idle, because a table has to stay small."""

_MOST_ANSWERS = 64


@dataclass(frozen=True, slots=True)
class _Known:
    problem: Problem
    templates: TemplateTable | None
    rates: LayoutRates | None
    further: tuple[Template, ...] = ()
    lacking: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = field(default_factory=dict)


class LayoutValues:
    """The tables of all jobs."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[JobKey, _Known] = {}
        self._used: set[JobKey] = set()

    def __len__(self) -> int:
        """Return the number of jobs with a table."""
        return len(self._known)

    def of(self, competitor: Competitor) -> LayoutRates | None:
        """Return a job's rates by the devices of its pools; ``None`` where layouts do not decide about them."""
        known = self._of(competitor)
        return None if known is None else known.rates

    def lacking(self, competitor: Competitor, devices: Mapping[str, int]) -> tuple[Mapping[str, int], ...]:
        """Return the smallest additions to these devices by pool that allow a further member (``lacking_devices``).

        Nothing is returned where the workers have not measured the model yet, or where no devices of the job's pools
        allow another member.
        """
        known = self._of(competitor)
        if known is None or known.templates is None:
            return ()
        kinds = known.problem.kinds
        have = tuple(devices.get(kind.name, 0) for kind in kinds)
        if have not in known.lacking:
            if len(known.lacking) >= _MOST_ANSWERS:
                known.lacking.clear()
            most = [kind.count for kind in kinds]
            known.lacking[have] = lacking_devices(
                known.templates, have, most, kinds=allowed_kinds(known.problem), further=known.further
            )
        found = known.lacking[have]
        return tuple({kind.name: n for kind, n in zip(kinds, each, strict=True) if n} for each in found)

    def _of(self, competitor: Competitor) -> _Known | None:
        """Return the templates and rates of a job's newest model and limits."""
        problem = _problem(competitor)
        if problem is None:
            return None
        key = competitor.job.key
        self._used.add(key)
        known = self._known.get(key)
        if known is None or known.problem != problem:
            found = template_table(problem)
            templates = found if isinstance(found, TemplateTable) else None
            further = shards_of(problem) if templates is not None else ()
            rates = LayoutRates(templates, allowed_kinds(problem), further) if templates is not None else None
            known = self._known[key] = _Known(problem, templates, rates, further)
        return known

    def forget_unused(self) -> None:
        """Drop the tables that were not used since the last call."""
        self._known = {key: known for key, known in self._known.items() if key in self._used}
        self._used.clear()


def _problem(competitor: Competitor) -> Problem | None:
    """Return the planner's question for all devices that the job may have, ``None`` before anything was measured."""
    spec, profiles = competitor.spec, competitor.telemetry.profiles
    measured = limited(profiles, known_limits(competitor.job.status, profiles))
    if not spec.parallelism.is_planned or not measured:
        return None
    counts = {
        pool.name: min(
            MOST_DEVICES, pool.max_replicas * members_per_worker(spec, pool, template_of(competitor.job, pool))
        )
        for pool in spec.worker_pools
    }
    problem = problem_of(spec, _with_unknown(measured, list(counts)), counts, competitor.telemetry.links)
    return problem if isinstance(problem, Problem) else None


def _with_unknown(measured: Mapping[str, PoolProfile], pools: list[str]) -> dict[str, PoolProfile]:
    """Return a profile for each pool; one without any is taken to be like the measured one of middle speed."""
    by_speed = sorted(measured, key=lambda name: (_seconds(measured[name]), name))
    like = by_speed[len(by_speed) // 2]
    found = {}
    for pool in pools:
        profile = measured.get(pool, measured[like])
        source = pool if pool in measured else like
        units = tuple(replace(unit, seconds={pool: unit.seconds[source]}) for unit in profile.units)
        found[pool] = replace(profile, units=units)
    return found


def _seconds(profile: PoolProfile) -> float:
    return sum(
        points[-1].forward_s + points[-1].backward_s for unit in profile.units for points in unit.seconds.values()
    )
