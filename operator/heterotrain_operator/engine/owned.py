"""Whose an object is, and what to say about one that has a name of the job's and is not its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heterotrain_core.contract import keys

from heterotrain_operator.cluster_state.views import JobView
from heterotrain_operator.kube.errors import Conflict, Rejected


def controls(job: JobView, body: Mapping[str, Any]) -> bool:
    """Return whether the job controls an object."""
    owners = body["metadata"].get("ownerReferences") or ()
    return any(each["uid"] == job.uid and each.get("controller") for each in owners)


def left_by_predecessor(job: JobView, body: Mapping[str, Any]) -> bool:
    """Return whether an object belongs to a deleted job of the same name: the garbage collector will delete it."""
    owners = body["metadata"].get("ownerReferences") or ()
    return any(
        each.get("controller") and (each["kind"], each["name"]) == (keys.KIND, job.key.name) and each["uid"] != job.uid
        for each in owners
    )


def name_in_use(body: Mapping[str, Any]) -> Rejected:
    """Return the refusal of an object whose name another one has."""
    kind, name = body["kind"], body["metadata"]["name"]
    return Rejected(
        f"a {kind} named {name} exists and does not belong to this job: delete or rename it, or rename the job",
        status_code=409,
    )


def check_owner(job: JobView, found: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Check that the object that has the name of one of the job's is its own.

    Raises:
        Conflict: it belongs to a deleted job of the same name, so it will be deleted soon.
        Rejected: it does not belong to the job.
    """
    if left_by_predecessor(job, found):
        raise Conflict(f"{body['metadata']['name']} belongs to a deleted job of the same name")
    if not controls(job, found):
        raise name_in_use(body)


def without_label(pod: Mapping[str, Any]) -> Rejected:
    """Return the refusal of a pod whose name an own one has that was isolated by its label, to look into it."""
    name = pod["metadata"]["name"]
    text = f"pod {name} is this job's but lacks the label {keys.LABEL_JOB}: give it back, or delete the pod"
    return Rejected(text, status_code=409)


def has_all(found: Any, wanted: Any) -> bool:
    """Return whether an object has all fields of another one with the same values; it may have more."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            name in found and has_all(found[name], wanted[name]) for name in wanted
        )
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(has_all, found, wanted))
    return bool(found == wanted)
