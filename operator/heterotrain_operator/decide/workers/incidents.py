"""Incidents: workers that end together end for the same cause, so all of them count as one."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_operator.decide.workers.state import Worker

INCIDENT_S = 30.0
"""Workers that end within this time of the first one end for the same cause."""


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
