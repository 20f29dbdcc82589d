"""Parses a pod's status container by container: the one that trains, init containers and those beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
MOST_WORDS = 400
"""Characters of foreign words about a container beside the training one."""
_USUAL = (None, "PodInitializing", "ContainerCreating")
"""Reasons of a container that waits for nothing but its turn or its image."""

_Body = Mapping[str, Any]
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


def main_container(spec: _Body, annotations: Mapping[str, str]) -> str:
    """Return the name of the container that trains: the annotated default container, else the first."""
    names = [container["name"] for container in spec.get("containers") or ()]
    chosen = annotations.get(DEFAULT_CONTAINER, "")
    return chosen if chosen in names else (names[0] if names else "")


def main_status(spec: _Body, status: _Body, annotations: Mapping[str, str]) -> _Body | None:
    """Return the status of the container that trains; ``None`` while it has none."""
    name = main_container(spec, annotations)
    return next((each for each in status.get("containerStatuses") or () if each["name"] == name), None)


def image_digest(spec: _Body, status: _Body, annotations: Mapping[str, str]) -> str:
    """Return the digest of the image that the training container runs; empty while it is not known."""
    found = _DIGEST.search(str((main_status(spec, status, annotations) or {}).get("imageID") or ""))
    return found.group() if found is not None else ""


def ready_since(spec: _Body, status: _Body, annotations: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether the container that trains is ready, and since when; empty where that is not known.

    The pod's condition Ready needs every container. A helper that has ended, or a proxy whose image is missing, would
    keep a worker from training for good.
    """
    conditions: Sequence[_Body] = status.get("conditions") or ()
    condition: _Body = next((each for each in conditions if each["type"] == "Ready"), {})
    since = str(condition.get("lastTransitionTime") or "")
    main = main_status(spec, status, annotations) or {}
    if condition.get("status") == "True" or "ready" not in main:
        return condition.get("status") == "True", since
    started = ((main.get("state") or {}).get("running") or {}).get("startedAt")
    return bool(main["ready"]), str(started or since)


def is_creating(spec: _Body, status: _Body, annotations: Mapping[str, str]) -> bool:
    """Return whether the training container of a bound pod was not created yet, for no reason that the pod names."""
    if not spec.get("nodeName") or status.get("phase") not in (None, "", "Pending"):
        return False
    main = main_status(spec, status, annotations)
    waiting = ((main or {}).get("state") or {}).get("waiting") or {}
    return main is None or waiting.get("reason") in ("ContainerCreating", "PodInitializing")


def why_waiting(spec: _Body, status: _Body, annotations: Mapping[str, str]) -> tuple[str, str]:
    """Return reason and message of an init container or the training one that cannot start; empty without one."""
    main = main_status(spec, status, annotations)
    for each in (*(status.get("initContainerStatuses") or ()), *([main] if main else [])):
        waiting: _Body = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in _USUAL:
            message = str(waiting.get("message") or "")
            return str(waiting["reason"]), message if each is main else f"init container {each['name']}: {message}"
    return "", ""


def trouble_beside(spec: _Body, status: _Body, annotations: Mapping[str, str]) -> str:
    """Return which container beside the training one waits or has failed, and why; empty without one."""
    main = main_status(spec, status, annotations)
    for each in status.get("containerStatuses") or ():
        if each is main:
            continue
        state = each.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") not in _USUAL:
            words = " ".join(str(waiting.get("message") or "").split())
            return f"container {each['name']}: {waiting['reason']}: {words}"[:MOST_WORDS].rstrip(": ")
        if ended.get("exitCode", 0):
            words = f"ended with exit code {ended['exitCode']} ({ended.get('reason') or 'Error'})"
            lines = str(ended.get("message") or "").strip().splitlines()
            return f"container {each['name']} {words}{f': {lines[-1]}' if lines else ''}"[:MOST_WORDS]
    return ""


def end_of(spec: _Body, status: _Body, annotations: Mapping[str, str]) -> tuple[str, _Body] | None:
    """Return how the training container ended, or name and end of the init container that kept it from starting.

    A final failure of an init container ends the pod, too, and has more details than the pod's phase.
    """
    state = ((main_status(spec, status, annotations) or {}).get("state") or {}).get("terminated")
    if state is not None:
        return "", state
    return next(_failed_inits(status), None) if status.get("phase") == "Failed" else None


def have_all_ended(spec: _Body, status: _Body) -> bool:
    """Return whether every container has ended."""
    ended = {
        each["name"] for each in status.get("containerStatuses") or () if (each.get("state") or {}).get("terminated")
    }
    return bool(ended) and ended >= {container["name"] for container in spec.get("containers") or ()}


def _failed_inits(status: _Body) -> Iterator[tuple[str, _Body]]:
    for each in status.get("initContainerStatuses") or ():
        state: _Body = (each.get("state") or {}).get("terminated") or {}
        if state.get("exitCode", 0) != 0:
            yield str(each["name"]), state
