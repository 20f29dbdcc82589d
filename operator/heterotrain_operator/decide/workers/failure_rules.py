"""Applies the rules of ``spec.failurePolicy`` to workers that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterotrain_core.contract.outcome import Cause

from heterotrain_operator.api.failures import ExitCodeMatch, FailureAction, FailurePolicy, FailureRule
from heterotrain_operator.decide.workers.state import Worker, WorkerState

_JUDGED = (WorkerState.FAILED, WorkerState.DISRUPTED)
_WORDS = {
    FailureAction.FAIL: "fails the job",
    FailureAction.RESTART: "counts it as a failure",
    FailureAction.IGNORE: "ignores it",
    FailureAction.AVOID_NODE: "avoids the node",
}


def judged(workers: Sequence[Worker], policy: FailurePolicy) -> tuple[Worker, ...]:
    """Return the workers with the states that the rules give to those that failed or were disrupted.

    The end of a worker whose image does not fit the operator is nobody's failure, so rules do not apply to it.
    """
    return tuple(_judged(worker, policy.ordered_rules) for worker in workers)


def _judged(worker: Worker, rules: Sequence[FailureRule]) -> Worker:
    if worker.state not in _JUDGED or worker.cause is Cause.VERSION_MISMATCH:
        return worker
    for number, rule in enumerate(rules):
        if not _matches(rule, worker):
            continue
        charged = rule.action in (FailureAction.FAIL, FailureAction.RESTART)
        return replace(
            worker,
            state=WorkerState.FAILED if charged else WorkerState.DISRUPTED,
            reason=f"{worker.reason} (failurePolicy.rules[{number}] {_WORDS[rule.action]})",
            action=rule.action,
        )
    return worker


def _matches(rule: FailureRule, worker: Worker) -> bool:
    pod = worker.pod
    if (codes := rule.on_exit_codes) is not None:
        code = pod.ended.exit_code if pod.ended is not None else 0
        return code != 0 and (code in codes.values) == (codes.operator is ExitCodeMatch.IN)
    if rule.on_pod_conditions:
        return any((each.type, each.status.value) in pod.conditions for each in rule.on_pod_conditions)
    found = {
        pod.ended.reason if pod.ended is not None else "",
        pod.disruption,
        pod.refused.partition(":")[0],
        worker.cause.value if worker.cause is not None else "",
    }
    return not found.isdisjoint(rule.on_reasons)
