"""A job's telemetry scrape by scrape, as the operator reads it, but queried from Prometheus afterwards.

One query for all scrapes of a period costs a fraction of one query per scrape, so it hardly disturbs a measurement.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from heterotrain_core.contract.plan import Plan
from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.prom.queries import everything_of
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.snapshot import counter_name
from heterotrain_operator.prom.vector import Series
from heterotrain_planner.perf.counters import CounterKey, Counters, Observation, observe
from heterotrain_planner.perf.line import persistence
from heterotrain_planner.perf.merge import merge_old
from heterotrain_planner.planning.shares import MemberEvidence

from lab.cluster import ClusterError
from lab.telemetry import Prometheus

EVERY_S = 1.0
"""How often Prometheus scrapes, and the operator reads."""
_MARGIN_S = 5.0


def name_of(worker_uid: str, local_rank: int) -> str:
    """Return a rank's name in observations."""
    return counter_name(MemberId(worker_uid, local_rank))


@dataclass(slots=True)
class Scrapes:
    """Observations of a job's members between successive scrapes, oldest first; ``read`` adds the new ones.

    All scrapes up to the Unix time ``known_s`` have been read; at first it is a time before the job's first step.
    """

    prometheus: Prometheus
    job_uid: str
    known_s: float
    observations: list[Observation] = field(default_factory=list)
    _counters: dict[CounterKey, Counters] = field(default_factory=dict)

    def read(self, *, until_s: float) -> None:
        """Read all scrapes since the last call; ``until_s`` is the current Unix time."""
        window_s = math.ceil(until_s - self.known_s + _MARGIN_S)
        rows = self.prometheus.query(f"{everything_of(self.job_uid)}[{window_s}s]")
        series = [(row["metric"], [(float(at), float(value)) for at, value in row["values"]]) for row in rows]
        while self.known_s + EVERY_S <= until_s:
            self.known_s += EVERY_S
            counters, newest_s = _at(series, self.known_s)
            self.observations.extend(observe(self._counters, counters, ended_s=newest_s))
            self._counters.update(counters)

    def evidence(self, plan: Plan) -> tuple[MemberEvidence, ...]:
        """Return the evidence about the plan's members, each of one rank, merged as the operator does it."""
        return tuple(
            MemberEvidence(
                member=name,
                pool=plan.pool_of(rank),
                observations=merge_old([o for o in self.observations if o.member == name]),
            )
            for rank in plan.ranks
            for name in (name_of(rank.worker_uid, rank.local_rank),)
        )


def mean_with_error(by_member: Mapping[str, Sequence[Observation]]) -> tuple[float, float]:
    """Return the mean seconds of a step and its standard error, averaged over the members with observations.

    The variance of the sum over scrapes of ``steps * (mean - all steps' mean)`` is that of independent scrapes times a
    factor for their correlation (``perf.line.persistence``).

    Raises:
        ClusterError: no member has observations.
    """
    means, errors = [], []
    for observations in by_member.values():
        pairs = [(o.steps, o.step.mean) for o in observations if o.step is not None]
        steps, seconds = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
        mean = float(steps @ seconds / steps.sum())
        pull = steps * (seconds - mean)
        free = len(pairs) / max(1, len(pairs) - 1)
        means.append(mean)
        errors.append(math.sqrt(free * persistence(pull) * float(pull @ pull)) / float(steps.sum()))
    if not means:
        raise ClusterError(
            "no steps to average: no member's share is different in the vectors of shares, so choose another seed"
        )
    return statistics.mean(means), statistics.mean(errors)


def _at(
    series: list[tuple[dict[str, Any], list[tuple[float, float]]]], moment_s: float
) -> tuple[Mapping[CounterKey, Counters], float]:
    """Return the counters that a read at a given time would have returned, and the time of their newest scrape."""
    rows, newest_s = [], 0.0
    for labels, samples in series:
        known = bisect_right(samples, (moment_s, math.inf))
        if known and math.isfinite(samples[known - 1][1]):
            at_s, value = samples[known - 1]
            rows.append(Series(labels, value))
            newest_s = max(newest_s, at_s)
    return parse_everything(rows).counters, newest_s
