"""Reports the findings of the workers' preflight: their sentences, each once."""

from __future__ import annotations

from heterotrain_operator.api.conditions import ConditionType, ConditionValue, find_condition, value_of
from heterotrain_operator.api.text import listed
from heterotrain_operator.cluster_state.telemetry import PreflightProblem
from heterotrain_operator.decide.lifecycle import ENDED_STAGES
from heterotrain_operator.decide.status.context import JobContext

_LISTED = 4
_NAMED = 3


def preflight_condition(context: JobContext) -> ConditionValue:
    """Return whether a check before training failed on a worker; limits are told, too, but fail nothing."""
    kind, gauges = ConditionType.PREFLIGHT_PASSED, context.telemetry.gauges.values()
    before = find_condition(context.job.status.conditions, kind)
    if before is not None and context.life.stage in ENDED_STAGES:  # its workers are gone, and what they found is not
        return value_of(before)
    workers: dict[PreflightProblem, set[str]] = {}
    for each in gauges:
        for problem in each.preflight_problems:
            workers.setdefault(problem, set()).add(each.worker)
    found = [f"{each.check}: {each.message} ({listed(sorted(workers[each]), most=_NAMED)})" for each in sorted(workers)]
    if any(not each.is_limit for each in workers):
        return kind.false("CheckFailed", _text(found))
    if found:
        return kind.true("LimitsFound", _text(found))
    if all(each.preflight_passed is None for each in gauges):
        return kind.unknown("NotReported")
    return kind.true("ChecksPassed")


def _text(found: list[str]) -> str:
    return listed(found, most=_LISTED, separator="; ")
