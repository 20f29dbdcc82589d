"""Reads what devices pods claim and nodes offer, as far as some job asks for such devices.

Nothing is read before a job asks for devices. DeviceClasses, ResourceSlices and ResourceClaims are then listed
regularly, like foreign pods: a watch of every claim in the cluster would cost more than the estimate is worth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import structlog

from heterotrain_operator.cluster_state.quantity import CLASS_PREFIX, container_requests
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.decide.plugins.claimed_devices.devices import (
    DeviceKey,
    DeviceRequest,
    Offer,
    allocated,
    amounts,
    devices_of,
    held_by_others,
    names_of_templates,
    requests_of_claim,
    selectors_of_class,
)
from heterotrain_operator.decide.plugins.claimed_devices.expressions import Expressions, UnknownExpressionError
from heterotrain_operator.kube.errors import KubeError, NotFound
from heterotrain_operator.kube.resources import Resource
from heterotrain_operator.kube.verbs import Body, Kube
from heterotrain_operator.threads import Threads

DEVICE_CLASSES: Final = Resource("resource.k8s.io/v1", "deviceclasses")
RESOURCE_SLICES: Final = Resource("resource.k8s.io/v1", "resourceslices")
RESOURCE_CLAIMS: Final = Resource("resource.k8s.io/v1", "resourceclaims")
RESOURCE_CLAIM_TEMPLATES: Final = Resource("resource.k8s.io/v1", "resourceclaimtemplates")
MOST_KINDS = 16
"""Kinds of devices that are counted, those asked for first; what a claim asks for besides is left to the scheduler."""

log = structlog.get_logger()


class DeviceReader:
    """Counts the kinds of devices that jobs ask for."""

    def __init__(self, kube: Kube, store: Store, threads: Threads) -> None:
        self._kube = kube
        self._threads = threads
        self._store = store
        self._expressions = Expressions()
        self._kinds: set[DeviceRequest] = set()
        self._offers: Mapping[DeviceKey, Offer] = {}
        self._counted: set[DeviceRequest] = set()
        self._matches: dict[tuple[str, ...], dict[tuple[DeviceKey, str], bool]] = {}
        """By expressions, which devices in which versions satisfy them: evaluating them is the dearest part."""
        self._complaint = ""
        self._one_at_a_time = asyncio.Lock()

    async def requests_of(self, namespace: str, spec: Mapping[str, Any]) -> dict[str, float]:
        """Return the devices that a pod claims, by resource; the kinds among them are counted from now on.

        What cannot be read is left out, so that the scheduler alone decides about it.

        Args:
            namespace: of the pod.
            spec: the pod's.
        """
        found: dict[DeviceRequest, int] = {}
        for name in names_of_templates(spec):
            try:
                template = await self._kube.get(RESOURCE_CLAIM_TEMPLATES, namespace, name)
                of_claim = requests_of_claim(template["spec"]["spec"])
            except (KubeError, KeyError, ValueError) as error:
                self._complain(f"the ResourceClaimTemplate {namespace}/{name} can't be read: {error}")
                continue
            for kind, count in of_claim.items():
                found[kind] = found.get(kind, 0) + count
        new = {*found, *await self._kinds_by_name(spec)} - self._kinds
        if new and len(self._kinds) + len(new) <= MOST_KINDS:
            self._kinds |= new
            await self.refresh()
        return {kind.resource: float(count) for kind, count in found.items() if kind in self._kinds}

    async def _kinds_by_name(self, spec: Mapping[str, Any]) -> set[DeviceRequest]:
        """Return the kinds that a pod requests by a resource's name, where no node has such a resource of its own."""
        names = {name for each in spec.get("containers") or () for name in container_requests(each)}
        names = {name for name in names if "/" in name and not self._store.nodes.offers(name)}
        if not names:
            return set()
        own = {DeviceRequest(name.removeprefix(CLASS_PREFIX)) for name in names if name.startswith(CLASS_PREFIX)}
        try:
            classes = await self._classes()
        except KubeError as error:
            self._complain(f"the DeviceClasses can't be listed: {error}")
            return own
        return own | {
            DeviceRequest(name, extended=extended)
            for name, body in classes.items()
            if (extended := str((body.get("spec") or {}).get("extendedResourceName") or "")) in names
        }

    async def _classes(self) -> dict[str, Body]:
        try:
            return {body["metadata"]["name"]: body async for body in self._kube.list(DEVICE_CLASSES)}
        except NotFound:  # a cluster without dynamic resource allocation
            return {}

    async def refresh(self) -> tuple[str, ...]:
        """Count the devices on each node, and those that others hold; return the nodes whose devices changed.

        After a failed list the numbers stay, and kinds without numbers count as unlimited.
        """
        if not self._kinds:
            return ()
        async with self._one_at_a_time:
            try:
                classes = await self._classes()
                slices = [body async for body in self._kube.list(RESOURCE_SLICES)]
                claims = [held async for body in self._kube.list(RESOURCE_CLAIMS) if (held := allocated(body))]
            except KubeError as error:
                self._complain(f"devices that pods claim can't be listed, so the scheduler alone counts them: {error}")
            else:
                self._offers, self._counted = await self._threads.run(self._count, classes, slices, set(self._kinds))
                workers = self._store.pods.all()
                self._store.foreign_devices = held_by_others(self._offers, claims, lambda *key: key in workers)
            uncounted, nodes = self._kinds - self._counted, self._store.nodes.all()
            return self._store.nodes.set_devices(amounts(self._offers.values(), uncounted=uncounted, nodes=nodes))

    def _count(
        self, classes: Mapping[str, Body], slices: Sequence[Body], kinds: set[DeviceRequest]
    ) -> tuple[dict[DeviceKey, Offer], set[DeviceRequest]]:
        """Return the devices that satisfy requests of the kinds, and the kinds that can be counted."""
        devices, counted = devices_of(slices), set()
        found: dict[DeviceKey, Offer] = {}
        before, self._matches = self._matches, {}
        for kind in sorted(kinds):
            if kind.class_name not in classes:
                self._complain(f"no DeviceClass is named {kind.class_name}, so no device is of this class")
                counted.add(kind)
                continue
            try:
                selectors = (*selectors_of_class(classes[kind.class_name]), *kind.selectors)
                known, now = before.get(selectors, {}), self._matches.setdefault(selectors, {})
                for device in devices:
                    key = (device.key, device.version)
                    if key not in now:
                        now[key] = known[key] if key in known else self._expressions.all_true(selectors, device)
            except (UnknownExpressionError, KeyError, TypeError) as error:
                self._complain(f"the scheduler alone counts devices of class {kind.class_name}: {error}")
                continue
            counted.add(kind)
            for device in devices:
                if now[device.key, device.version]:
                    offer = found.get(device.key, Offer(device.node, ()))
                    found[device.key] = replace(offer, kinds=(*offer.kinds, kind))
        return found, counted

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            self._complaint = what
            log.warning(what)
