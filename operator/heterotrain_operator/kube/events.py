"""Publish Events: repeated messages about a job become one Event with a count."""

from __future__ import annotations

import hashlib
from typing import Any

from heterotrain_core.contract import keys

from heterotrain_operator.kube.errors import Conflict
from heterotrain_operator.kube.resources import EVENTS
from heterotrain_operator.kube.verbs import Body, Kube


async def publish(
    kube: Kube, *, namespace: str, name: str, uid: str, warning: bool, reason: str, message: str, now: str
) -> None:
    """Publish one Event about a job.

    Raises:
        KubeError: the API server did not accept it.
    """
    digest = hashlib.sha256(f"{uid}\0{reason}\0{message}".encode()).hexdigest()[:16]
    event = f"{name}.{digest}"
    body: Body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event, "namespace": namespace},
        "involvedObject": _job_reference(namespace, name, uid),
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": keys.FIELD_MANAGER},
        "reportingComponent": f"{keys.GROUP}/operator",
        "reportingInstance": keys.FIELD_MANAGER,
    }
    try:
        await kube.create(EVENTS, body)
    except Conflict:
        existing = await kube.get(EVENTS, namespace, event)
        patch = {"count": int(existing.get("count") or 1) + 1, "lastTimestamp": now}
        await kube.merge(EVENTS, namespace, event, patch)


def _job_reference(namespace: str, name: str, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{keys.GROUP}/{keys.VERSION}",
        "kind": keys.KIND,
        "namespace": namespace,
        "name": name,
        "uid": uid,
    }
