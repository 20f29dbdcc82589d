"""Disruptions in a row: a job that loses workers and commits no step in between gets new ones less and less often.

A kubelet that refuses every pod, or a broken device plugin, would otherwise make new pods without end. Each of these
ends is nobody's fault, so ``backoffLimit`` never ends them. A committed step ends the row. Workers that end together
end for the same cause, so all of them count as one incident.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_operator.api.internal_status import InternalDisruptions
from heterotrain_operator.api.status import MAX_MESSAGE_LENGTH
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.workers.state import Worker, WorkerState

REPEATED = 3
"""Disruptions in a row from which on the job's conditions show them, and a node of all of them is avoided."""
FIRST_DELAY_S = 20.0
"""Wait after the second disruption in a row; it doubles. The first lost worker is replaced at once."""
LONGEST_DELAY_S = 300.0
FORGET_S = 2 * LONGEST_DELAY_S
"""Time without a disruption after which a row ends, whether or not a step is known to be committed."""
INCIDENT_S = 30.0
"""Workers that end within this time of the first one end for the same cause."""


NO_ROW = InternalDisruptions(incidents=0, last_time=rfc3339(0.0))


def repeated(row: InternalDisruptions) -> bool:
    """Return whether a row is long enough to be shown."""
    return row.incidents >= REPEATED


def row_delay_s(row: InternalDisruptions, now_s: float) -> float:
    """Return for how many more seconds no worker is created."""
    if row.incidents < 2:  # noqa: PLR2004  # a single one is no row
        return 0.0
    longest_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(row.incidents - 2, 20))
    return max(0.0, min(seconds(row.last_time) + longest_s - now_s, longest_s))


def described(row: InternalDisruptions, now_s: float) -> str:
    """Describe a row in one sentence."""
    wait_s = row_delay_s(row, now_s)
    then = f"; the next worker is created at {rfc3339(now_s + wait_s)}" if wait_s else ""
    count = f"{row.incidents} disruptions in a row without a committed step in between"
    return f"{count}; the newest: {row.reason}{then}"


def continued(
    before: InternalDisruptions, lost: Sequence[Worker], gone: Sequence[str], *, step: int | None, now_s: float
) -> InternalDisruptions:
    """Return the row after this pass.

    Args:
        before: the row so far.
        lost: disrupted workers that were not counted before.
        gone: names of lost workers without a pod that were not counted before.
        step: committed steps; ``None`` where they are not known.
        now_s: now.
    """
    last_s = min(seconds(before.last_time), now_s)
    committed = step is not None and (before.step is None or step > before.step)
    if before.incidents and (committed or now_s - last_s > FORGET_S):
        before, last_s = NO_ROW, 0.0
    incidents = new_incidents(lost, last_s, now_s=now_s)
    if gone and not lost and now_s - last_s > INCIDENT_S:
        incidents = 1
    if not incidents:
        return before
    reason = f"{lost[-1].pod.name}: {lost[-1].reason}" if lost else f"{gone[-1]}: its pod is gone"
    node = _node_of(lost)
    unknown = step is None and any(_trained_for_long(worker, now_s=now_s) for worker in lost)
    return InternalDisruptions(
        incidents=1 if unknown else before.incidents + incidents,
        last_time=rfc3339(now_s),
        step=step,
        node=node,
        on_node=0 if not node else before.on_node + 1 if node == before.node else 1,
        reason=reason[:MAX_MESSAGE_LENGTH],
    )


def _node_of(lost: Sequence[Worker]) -> str:
    """Return the only node of these disruptions, where the cause may be the node; empty otherwise."""
    nodes = {
        worker.pod.node if worker.state is WorkerState.DISRUPTED and not worker.pod.disruption else ""
        for worker in lost
    }
    return nodes.pop() if len(nodes) == 1 and not any(worker.pod.deleting for worker in lost) else ""


def _trained_for_long(worker: Worker, *, now_s: float) -> bool:
    return (end_s(worker) or now_s) - worker.pod.created_s > LONGEST_DELAY_S


def new_incidents(ended: Sequence[Worker], known_s: float, *, now_s: float) -> int:
    """Return the number of incidents among new ends that are not part of the known one.

    A worker that was created after an incident began is never part of it: otherwise workers that end again and again
    right after their start would count once.

    Args:
        ended: workers that were not counted before.
        known_s: when the newest known incident was noticed; 0 for none.
        now_s: now; stands for the time of an end that is not known.
    """
    incidents, begin_s = 0, known_s
    for worker in sorted(ended, key=end_s):
        ended_s = end_s(worker) or now_s
        if worker.pod.created_s <= begin_s and abs(ended_s - begin_s) <= INCIDENT_S:
            continue
        incidents, begin_s = incidents + 1, ended_s
    return incidents


def end_s(worker: Worker) -> float:
    """Return when a worker ended; 0 where that is not known."""
    return worker.pod.ended.finished_s if worker.pod.ended else 0.0
