"""Kubernetes quantities as numbers: cores, bytes, pieces; and sums of what pods request."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_SUFFIX = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_FORM = re.compile(r"^([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([a-zA-Z]{0,2})$")

MOST = 2.0**63
"""What is more is no amount of anything, and infinity could not be counted with."""
PODS = "pods"
"""A node's allocatable names how many pods it may hold: every pod requests one."""


def parse_quantity(text: str | float) -> float:
    """Return a quantity such as ``500m``, ``1536Mi`` or ``4`` as a number of cores, bytes or pieces, ``MOST`` at most either way.

    Raises:
        ValueError: the text is no quantity.
    """
    found = _FORM.match(str(text).strip())
    if found is None or found[2] not in _SUFFIX:
        raise ValueError(f"{text!r} is no quantity: write a number with an optional suffix such as m, Mi or Gi")
    return max(-MOST, min(float(found[1]) * _SUFFIX[found[2]], MOST))


def quantities(raw: Mapping[str, Any] | None) -> dict[str, float]:
    """Return a resource list with its quantities as numbers."""
    return {name: parse_quantity(value) for name, value in (raw or {}).items()}


def container_requests(container: Mapping[str, Any]) -> dict[str, float]:
    """Return what one container requests; a resource with only a limit requests its limit, as the API server defaults it."""
    resources = container.get("resources") or {}
    return {**quantities(resources.get("limits")), **quantities(resources.get("requests"))}


def pod_requests(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return what the scheduler sets aside for a pod.

    The sum over containers and native sidecars, or what the hungriest init container needs beside the sidecars started
    before it, whichever is larger; plus the runtime class's overhead, plus one pod.
    """
    sidecars: Counter[str] = Counter()
    peak: dict[str, float] = {}
    for container in spec.get("initContainers") or ():
        needs = container_requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars.update(needs)
            needs = {}
        for name in {*needs, *sidecars}:
            peak[name] = max(peak.get(name, 0.0), needs.get(name, 0.0) + sidecars[name])
    total = added([sidecars, *(container_requests(c) for c in spec.get("containers") or ())])
    largest = {name: max(total.get(name, 0.0), peak.get(name, 0.0)) for name in {*total, *peak}}
    return added([largest, quantities(spec.get("overhead")), {PODS: 1.0}])


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of resource lists."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
