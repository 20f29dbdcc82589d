"""Documents for programs (``-o json|yaml``) of the commands on a cluster. The names are documented and stay. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heterotrain_cli.cluster.api import event_time
from heterotrain_cli.cluster.diagnosis import findings
from heterotrain_cli.cluster.view import JobSummary, cost_until_end


def description_document(view: JobSummary, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ``heterotrain describe`` says of a job: durations in seconds, unknown values as ``None``."""
    found = findings(view)
    return {
        "name": view.name,
        "namespace": view.namespace,
        "state": view.status.state or "New",
        "reason": view.status.reason,
        "hasProblem": any(each.is_problem for each in found),
        "findings": [{"what": each.what, "isProblem": each.is_problem} for each in found],
        "ageSeconds": view.age_s,
        "runtimeSeconds": view.runtime_s,
        "costUntilEnd": cost_until_end(view),
        "events": [_event(each) for each in events],
        "status": view.body.get("status") or {},
    }


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "time": event_time(event),
        "type": str(event.get("type") or "Normal"),
        "reason": str(event.get("reason") or ""),
        "message": " ".join(str(event.get("message") or event.get("note") or "").split()),
    }
