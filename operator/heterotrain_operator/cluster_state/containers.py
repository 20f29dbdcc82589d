"""Parses a pod's status container by container: the one that trains, init containers and those beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
MOST_WORDS = 400
"""Characters of foreign words about a container beside the training one."""
_USUAL = (None, "PodInitializing", "ContainerCreating")
"""Reasons of a container that waits for nothing but its turn or its image."""

_Body = Mapping[str, Any]
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


def training_container(pod: _Body) -> dict[str, Any]:
    """Return the container of a pod or a template that trains: the annotated one, else the first; empty for none."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    chosen = ((pod.get("metadata") or {}).get("annotations") or {}).get(DEFAULT_CONTAINER)
    return next((each for each in containers if each.get("name") == chosen), containers[0] if containers else {})


class PodContainers:
    """The containers of a pod, and what its kubelet reports about each."""

    def __init__(self, pod: _Body) -> None:
        self._spec, self._status = pod["spec"], pod.get("status") or {}
        self._reported: Sequence[_Body] = self._status.get("containerStatuses") or ()
        self._inits: Sequence[_Body] = self._status.get("initContainerStatuses") or ()
        self.main = training_container(pod)
        """The container that trains; empty for a pod without containers."""
        self._main: _Body = next((each for each in self._reported if each["name"] == self.main.get("name")), {})
        """Its status; empty while it has none."""

    @property
    def image_digest(self) -> str:
        """The digest of the image that the training container runs; empty while it is not known."""
        found = _DIGEST.search(str(self._main.get("imageID") or ""))
        return found.group() if found is not None else ""

    @property
    def fatal_probes(self) -> tuple[str, ...]:
        """Probes whose failure makes the kubelet end the training container."""
        return tuple(probe for probe in ("livenessProbe", "startupProbe") if self.main.get(probe))

    @property
    def ready_since(self) -> tuple[bool, str]:
        """Whether the container that trains is ready, and since when; empty where that is not known.

        The pod's condition Ready needs every container. A helper that has ended, or a proxy whose image is missing,
        would keep a worker from training for good.
        """
        conditions: Sequence[_Body] = self._status.get("conditions") or ()
        condition: _Body = next((each for each in conditions if each["type"] == "Ready"), {})
        since = str(condition.get("lastTransitionTime") or "")
        if condition.get("status") == "True" or "ready" not in self._main:
            return condition.get("status") == "True", since
        started = ((self._main.get("state") or {}).get("running") or {}).get("startedAt")
        return bool(self._main["ready"]), str(started or since)

    @property
    def creating(self) -> bool:
        """Whether the training container of a bound pod was not created yet, for no reason that the pod names."""
        if not self._spec.get("nodeName") or self._status.get("phase") not in (None, "", "Pending"):
            return False
        waiting = (self._main.get("state") or {}).get("waiting") or {}
        return not self._main or waiting.get("reason") in ("ContainerCreating", "PodInitializing")

    @property
    def why_waiting(self) -> tuple[str, str]:
        """Reason and message of an init container or the training one that cannot start; empty without one."""
        for each in (*self._inits, self._main):
            waiting: _Body = (each.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in _USUAL:
                message = str(waiting.get("message") or "")
                words = message if each is self._main else f"init container {each['name']}: {message}"
                return str(waiting["reason"]), words
        return "", ""

    @property
    def trouble_beside(self) -> str:
        """Which container beside the training one waits or has failed, and why; empty without one."""
        for each in self._reported:
            if each is self._main:
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

    @property
    def end(self) -> tuple[str, _Body] | None:
        """How the training container ended, or name and end of the init container that kept it from starting.

        A final failure of an init container ends the pod, too, and has more details than the pod's phase.
        """
        state = (self._main.get("state") or {}).get("terminated")
        if state is not None:
            return "", state
        ends = ((str(each["name"]), (each.get("state") or {}).get("terminated") or {}) for each in self._inits)
        failed = (each for each in ends if each[1].get("exitCode", 0) != 0)
        return next(failed, None) if self._status.get("phase") == "Failed" else None

    @property
    def started(self) -> set[str]:
        """Names of the containers that have run."""
        return {
            each["name"]
            for each in self._reported
            if each.get("restartCount") or set(each.get("state") or {}) & {"running", "terminated"}
        }

    @property
    def all_ended(self) -> bool:
        """Whether every container has ended."""
        ended = {each["name"] for each in self._reported if (each.get("state") or {}).get("terminated")}
        return bool(ended) and ended >= self.names

    @property
    def names(self) -> set[str]:
        """Names of the containers, without init containers."""
        return {container["name"] for container in self._spec.get("containers") or ()}
