"""Nodes that a job avoids because its workers failed there while others went on.

A script that fails everywhere must not use up the cluster's nodes, so a failure is a node's only where workers on
other nodes still run. Disruptions are a node's where several in a row were there, such as pods that a kubelet refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_operator.api.failures import FailureAction
from heterotrain_operator.api.status import MAX_FAILURE_LENGTH, NodeFailures
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.workers.state import Worker

AVOIDED_S = 86_400.0
"""Seconds since the last failure on a node after which it is used again."""
LEAST_FAILURES = 2
"""Failures on a node after which a job avoids it; one may be chance."""
MOST_NODES = 32
"""Nodes that are kept for a job; those with the oldest failures are forgotten first."""


def blamed(
    before: Sequence[NodeFailures],
    workers: Sequence[Worker],
    failed: Sequence[Worker],
    disrupted: Sequence[Worker],
    *,
    at_fault: str = "",
    incident: bool,
    now_s: float,
) -> tuple[NodeFailures, ...]:
    """Return the nodes with their failures after this pass.

    Args:
        before: those before it. A later time is of a clock that was ahead: it counts as now.
        workers: all workers of the job.
        failed: failures that were not counted before.
        disrupted: disruptions that were not counted before.
        at_fault: the node of disruptions that repeat.
        incident: whether the failures are a new incident.
        now_s: now.
    """
    known: dict[str, NodeFailures] = {}
    for each in before:
        last_s = min(now_s, seconds(each.last_time))
        if now_s - last_s < AVOIDED_S:
            known[each.name] = each.model_copy(update={"last_time": rfc3339(last_s)})
    nodes = {worker.pod.node for worker in failed}
    if incident and len(nodes) == 1 and any(w.placed and w.pod.node not in nodes for w in workers):
        _blame(known, failed[-1], now_s=now_s, named=False)
    for worker in (*failed, *disrupted):
        if worker.action is FailureAction.AVOID_NODE or (at_fault and worker.pod.node == at_fault):
            _blame(known, worker, now_s=now_s, named=True)
    newest = sorted(known.values(), key=lambda each: each.last_time, reverse=True)[:MOST_NODES]
    return tuple(sorted(newest, key=lambda each: each.name))


def _blame(known: dict[str, NodeFailures], worker: Worker, *, now_s: float, named: bool) -> None:
    node = worker.pod.node
    if not node:
        return
    before = known.get(node)
    failures = before.failures + 1 if before else 1
    named = named or (before is not None and before.named)
    known[node] = NodeFailures(
        name=node,
        failures=failures,
        last_time=rfc3339(now_s),
        reason=f"{worker.pod.name}: {worker.reason}"[:MAX_FAILURE_LENGTH],
        named=named,
        avoided=named or failures >= LEAST_FAILURES,
    )
