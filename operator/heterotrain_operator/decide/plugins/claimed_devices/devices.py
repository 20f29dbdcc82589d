"""Devices that pods claim (dynamic resource allocation), as resources of nodes and requests of pods.

A node's kubelet does not count them: drivers list them in ResourceSlices, and the scheduler allocates each to a claim.
Here, devices of one kind are a resource with the name that Kubernetes itself gives to the devices of a class, so that
they are summed and compared like any other resource:

- a claim's request for n devices of a class is a request for n of that resource;
- the devices in a node's slices that match the kind are its allocatable amount.

This is an estimate. A device that matches several kinds counts in each; claims that share one object, ask for
alternatives or for all devices, and partitions that exclude each other are left to the scheduler.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heterotrain_operator.cluster_state.quantity import CLASS_PREFIX, MOST_OF_ONE_CLAIM

EXTENDED_RESOURCE_CLAIM = "resource.kubernetes.io/extended-resource-claim"
"""Annotation of claims that the scheduler makes for requests of resources, as against claims of a pod's own."""
UNCOUNTED = 2.0**20
"""Devices on each node of a kind that cannot be counted: the scheduler alone decides."""
_BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")

DeviceKey = tuple[str, str, str]
"""Driver, pool and name of a device."""


@dataclass(frozen=True, slots=True, order=True)
class DeviceRequest:
    """Which devices satisfy a request.

    Attributes:
        class_name: their DeviceClass.
        selectors: the request's own expressions, besides those of the class.
        extended: a resource name that the class gives to its devices; empty for requests by claim.
    """

    class_name: str
    selectors: tuple[str, ...] = ()
    extended: str = ""

    @property
    def resource(self) -> str:
        """The resource as which such devices are counted."""
        if self.extended:
            return self.extended
        suffix = f"?{hashlib.sha256(json.dumps(self.selectors).encode()).hexdigest()[:12]}" if self.selectors else ""
        return f"{CLASS_PREFIX}{self.class_name}{suffix}"


@dataclass(frozen=True, slots=True)
class Device:
    """A device on a node, with what expressions may ask of it.

    Attributes:
        key: its driver, its pool and its own name; unique in the cluster.
        node: name of its node.
        version: of the slice that lists it; a device changes with its slice only.
        attributes: values by domain and name.
        capacity: quantities by domain and name.
    """

    key: DeviceKey
    node: str
    version: str
    attributes: Mapping[str, Mapping[str, str | int | bool]]
    capacity: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Allocated:
    """The devices of one claim, and the names of the pods for which they are reserved."""

    namespace: str
    pods: frozenset[str]
    devices: tuple[DeviceKey, ...]
    extended: bool


def requests_of_claim(claim: Mapping[str, Any]) -> dict[DeviceRequest, int]:
    """Return how many devices of each kind a claim asks for; what is left to the scheduler is left out.

    Args:
        claim: the ``spec`` of a ResourceClaim.

    Raises:
        ValueError: the text is none that the API server would accept.
    """
    found: Counter[DeviceRequest] = Counter()
    try:
        for request in (claim.get("devices") or {}).get("requests") or ():
            exactly = request.get("exactly")
            if not exactly or exactly.get("adminAccess") or exactly.get("allocationMode", "ExactCount") != "ExactCount":
                continue
            selectors = tuple(_expression(each) for each in exactly.get("selectors") or ())
            count = int(exactly.get("count", 1))
            if not 0 < count <= MOST_OF_ONE_CLAIM:
                raise ValueError(f"a claim cannot ask for {count} devices")
            found[DeviceRequest(str(exactly["deviceClassName"]), selectors)] += count
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not the spec of a ResourceClaim: {error!r}") from error
    return dict(found)


def selectors_of_class(device_class: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the expressions that a device of a DeviceClass satisfies."""
    return tuple(_expression(each) for each in (device_class.get("spec") or {}).get("selectors") or ())


def devices_of(slices: Iterable[Mapping[str, Any]]) -> list[Device]:
    """Return the devices of nodes in ResourceSlices: those of each pool's newest generation that carry no taint.

    Devices that several nodes can reach are left to the scheduler. A slice that cannot be read counts as empty.
    """
    newest: dict[tuple[str, str], int] = {}
    found: list[tuple[int, Device]] = []
    for body in slices:
        try:
            generation, devices = _devices_of_slice(body["spec"], body["metadata"]["resourceVersion"])
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        for device in devices:
            newest[device.key[:2]] = max(newest.get(device.key[:2], 0), generation)
            found.append((generation, device))
    return [device for generation, device in found if generation == newest[device.key[:2]]]


def _devices_of_slice(spec: Mapping[str, Any], version: str) -> tuple[int, list[Device]]:
    driver, pool, node = str(spec["driver"]), spec["pool"], spec.get("nodeName")
    if not node:
        return 0, []
    devices = [
        Device(
            key=(driver, str(pool["name"]), str(each["name"])),
            node=str(node),
            version=version,
            attributes=_by_domain(driver, {name: _value(value) for name, value in _of(each, "attributes").items()}),
            capacity=_by_domain(driver, {name: str(value["value"]) for name, value in _of(each, "capacity").items()}),
        )
        for each in spec.get("devices") or ()
        if not any(taint.get("effect") in _BLOCKING_EFFECTS for taint in each.get("taints") or ())
    ]
    return int(pool.get("generation") or 0), devices


def allocated(claim: Mapping[str, Any]) -> Allocated | None:
    """Return the devices that a ResourceClaim holds; ``None`` without an allocation or for an unreadable one."""
    try:
        metadata, status = claim["metadata"], claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
        devices = tuple(
            (each["driver"], each["pool"], each["device"]) for each in results if not each.get("adminAccess")
        )
        if not devices:
            return None
        return Allocated(
            namespace=metadata["namespace"],
            pods=frozenset(each["name"] for each in status.get("reservedFor") or () if each.get("resource") == "pods"),
            devices=devices,
            extended=EXTENDED_RESOURCE_CLAIM in (metadata.get("annotations") or {}),
        )
    except (AttributeError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Offer:
    """A device that satisfies requests of these kinds."""

    node: str
    kinds: tuple[DeviceRequest, ...]


def amounts(
    offers: Iterable[Offer], *, uncounted: Collection[DeviceRequest], nodes: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Return by node how many devices of each kind it has, by resource.

    Args:
        offers: the devices that satisfy requests of any kind.
        uncounted: kinds that cannot be counted; each of the nodes has any number of them.
        nodes: all nodes.
    """
    found: dict[str, Counter[str]] = {}
    for offer in offers:
        found.setdefault(offer.node, Counter()).update(kind.resource for kind in offer.kinds)
    any_number = {kind.resource: UNCOUNTED for kind in uncounted}
    names = {*found, *nodes} if any_number else found
    return {
        node: {**{name: float(count) for name, count in found.get(node, {}).items()}, **any_number} for node in names
    }


def held_by_others(
    offers: Mapping[DeviceKey, Offer], claims: Iterable[Allocated], is_worker: Callable[[str, str], bool]
) -> dict[str, dict[str, float]]:
    """Return by node how many devices of each kind are held by claims of pods that are no workers.

    A worker's own devices are part of its requests, and requests by resource name are part of the requests of any pod.

    Args:
        offers: the devices that satisfy requests of any kind.
        claims: those that hold devices.
        is_worker: whether a namespace has a worker of this name.
    """
    found: dict[str, Counter[str]] = {}
    for claim in claims:
        if any(is_worker(claim.namespace, pod) for pod in claim.pods):
            continue
        for offer in (offers[key] for key in claim.devices if key in offers):
            names = (kind.resource for kind in offer.kinds if not (claim.extended and kind.extended))
            found.setdefault(offer.node, Counter()).update(names)
    return {node: {name: float(count) for name, count in counts.items()} for node, counts in found.items()}


def _expression(selector: Mapping[str, Any]) -> str:
    return str(selector["cel"]["expression"])


def _of(device: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = device.get(field) or {}
    return found


def _value(attribute: Mapping[str, Any]) -> str | int | bool:
    for kind in ("string", "version"):
        if kind in attribute:
            return str(attribute[kind])
    if "bool" in attribute:
        return bool(attribute["bool"])
    return int(attribute["int"]) if "int" in attribute else ""


def _by_domain(driver: str, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return values by domain and name; a name without a domain is in that of the driver."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        domain, _, own = name.rpartition("/")
        found.setdefault(domain or driver, {})[own] = value
    return found


def names_of_templates(spec: Mapping[str, Any]) -> Sequence[str]:
    """Return the ResourceClaimTemplates of a pod; a claim of its own that several pods share is left out."""
    return [
        str(each["resourceClaimTemplateName"])
        for each in spec.get("resourceClaims") or ()
        if isinstance(each, Mapping) and each.get("resourceClaimTemplateName")
    ]
