"""Kubernetes quantities as numbers (cores, bytes, items), and sums of pod requests.

``kubernetes.utils.quantity`` is not used. It accepts ``Infinity``, ``1_000`` and ``1K``, which are not quantities; it
returns decimals of any size, which need the same bound as here; and it would tie pure decisions to the API client.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from heterotrain_core.contract import keys

_DECIMAL = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{prefix}i": 2.0 ** (10 * power) for power, prefix in enumerate("KMGTPE", start=1)}
_SUFFIX = _DECIMAL | _BINARY
_FORM = re.compile(r"^([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([a-zA-Z]{0,2})$")

MOST = 2.0**63
"""The bound of all quantities: a larger number is not a real amount, and infinity would spoil sums."""
_POD_LEVEL = ("cpu", "memory")
_HUGE_PAGES = "hugepages-"
"""Resources that a pod may request as a whole."""
PODS = "pods"
"""The resource that bounds the number of pods on a node; every pod requests one."""
MORE_REQUESTS = f"{keys.GROUP}/devices"
"""The operator's note on a pod about devices, which its containers do not request; see ``more_requests``."""
CLASS_PREFIX = "deviceclass.resource.kubernetes.io/"
"""Prefix of the resource that is each device class's own in Kubernetes; the class's name follows."""
MOST_OF_ONE_CLAIM, _MOST_CLAIMS, _LONGEST_NOTE = 32, 64, 8192
"""As in the API server."""


def parse_quantity(text: str | float) -> float:
    """Return a quantity such as ``500m``, ``1536Mi`` or ``4`` as a number between ``-MOST`` and ``MOST``.

    Raises:
        ValueError: the text is not a quantity.
    """
    found = _FORM.match(str(text).strip())
    if found is None or found[2] not in _SUFFIX:
        raise ValueError(f"{text!r} is not a quantity: write a number with an optional suffix such as m, Mi or Gi")
    return max(-MOST, min(float(found[1]) * _SUFFIX[found[2]], MOST))


def quantities(raw: Mapping[str, Any] | None) -> dict[str, float]:
    """Return a resource list with its quantities as numbers."""
    return {name: parse_quantity(value) for name, value in (raw or {}).items()}


def container_requests(container: Mapping[str, Any]) -> dict[str, float]:
    """Return a container's requests; as in the API server, a limit is the default for a missing request."""
    resources = container.get("resources") or {}
    return {**quantities(resources.get("limits")), **quantities(resources.get("requests"))}


def pod_requests(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that the scheduler reserves for a pod.

    For each resource, this is the larger of two sums: all containers and native sidecars, or the largest init
    container plus the sidecars started before it. Resources of the pod itself (``spec.resources``) replace the sum of
    its containers. The runtime class's overhead and one pod are added. A pod that is resized in place counts with the
    size that it asks for. What it requests in other ways is in ``more_requests``.
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
    return added([{**largest, **_of_whole_pod(spec, largest)}, quantities(spec.get("overhead")), {PODS: 1.0}])


def _of_whole_pod(spec: Mapping[str, Any], of_containers: Mapping[str, float]) -> dict[str, float]:
    """Return requests of the pod as a whole; as in the API server, a limit counts where no container requests any."""
    resources = spec.get("resources")
    if not isinstance(resources, Mapping):  # the dry run refuses it
        return {}
    limits, requests = (quantities(_mapping(resources.get(kind))) for kind in ("limits", "requests"))
    chosen = {**{name: limit for name, limit in limits.items() if not of_containers.get(name)}, **requests}
    return {name: amount for name, amount in chosen.items() if name in _POD_LEVEL or name.startswith(_HUGE_PAGES)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of resource lists."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def text_of_more_requests(requests: Mapping[str, float]) -> str:
    """Return the devices among a pod's requests as a note; empty without any."""
    named = {name: int(amount) for name, amount in requests.items() if name.startswith(CLASS_PREFIX)}
    return json.dumps(named, sort_keys=True) if named else ""


def more_requests(text: str) -> dict[str, float]:
    """Return the devices in a pod's note; empty for an invalid one, as whoever may change pods could write it."""
    if not text or len(text) > _LONGEST_NOTE:
        return {}
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or not all(isinstance(each, int) for each in found.values()):
            return {}
    except (ValueError, RecursionError):
        return {}
    return {
        name: float(count)
        for name, count in found.items()
        if name.startswith(CLASS_PREFIX) and 0 < count <= MOST_OF_ONE_CLAIM * _MOST_CLAIMS
    }
