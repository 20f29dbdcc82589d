"""Nodes that a job avoids because its workers failed there while others went on.

A script that fails everywhere must not use up the cluster's nodes, so a failure is a node's only where workers on
other nodes still run. Disruptions are a node's where several in a row were there, such as pods that a kubelet refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterotrain_operator.api.failures import FailureAction
from heterotrain_operator.decide.workers.state import Worker

AVOIDED_S = 86_400.0
"""Seconds since the last failure on a node after which it is used again."""
LEAST_FAILURES = 2
"""Failures on a node after which a job avoids it; one may be chance."""
MOST_NODES = 32
"""Nodes that are kept for a job; those with the oldest failures are forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedNode:
    """Failures of a job's workers on a node.

    Attributes:
        name: of the node.
        failures: how many, each incident once.
        last_s: time of the newest.
        reason: the newest in one sentence.
        named: whether a rule of the job asks to avoid the node.
    """

    name: str
    failures: int
    last_s: float
    reason: str
    named: bool = False

    @property
    def avoided(self) -> bool:
        """Whether the job avoids the node."""
        return self.named or self.failures >= LEAST_FAILURES


def blamed(
    before: Sequence[BlamedNode],
    workers: Sequence[Worker],
    failed: Sequence[Worker],
    disrupted: Sequence[Worker],
    *,
    at_fault: str = "",
    incident: bool,
    now_s: float,
) -> tuple[BlamedNode, ...]:
    """Return the nodes with their failures after this pass.

    Args:
        before: those before it.
        workers: all workers of the job.
        failed: failures that were not counted before.
        disrupted: disruptions that were not counted before.
        at_fault: the node of disruptions that repeat.
        incident: whether the failures are a new incident.
        now_s: now.
    """
    known: dict[str, BlamedNode] = {each.name: each for each in before if now_s - each.last_s < AVOIDED_S}
    nodes = {worker.pod.node for worker in failed}
    if incident and len(nodes) == 1 and any(w.placed and w.pod.node not in nodes for w in workers):
        _blame(known, failed[-1], now_s=now_s, named=False)
    for worker in (*failed, *disrupted):
        if worker.action is FailureAction.AVOID_NODE or (at_fault and worker.pod.node == at_fault):
            _blame(known, worker, now_s=now_s, named=True)
    newest = sorted(known.values(), key=lambda each: each.last_s, reverse=True)[:MOST_NODES]
    return tuple(sorted(newest, key=lambda each: each.name))


def _blame(known: dict[str, BlamedNode], worker: Worker, *, now_s: float, named: bool) -> None:
    node = worker.pod.node
    if not node:
        return
    before: Mapping[str, BlamedNode] = known
    failures = before[node].failures if node in before else 0
    known[node] = BlamedNode(
        name=node,
        failures=failures + 1,
        last_s=now_s,
        reason=f"{worker.pod.name}: {worker.reason}",
        named=named or (node in before and before[node].named),
    )
