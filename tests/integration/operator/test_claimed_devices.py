"""Devices that workers claim (dynamic resource allocation), with the real scheduler and the real claim controller."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.decide.plugins.claimed_devices.devices import EXTENDED_RESOURCE_CLAIM
from heterotrain_operator.engine.plugins.claimed_devices import (
    DEVICE_CLASSES,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
)
from heterotrain_operator.kube.resources import PODS, Resource
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import Cluster, Operator
from support.waiting import until

GPU = "type == 'gpu'"
CONTAINER = {"name": "main", "image": "image.invalid/none:1", "resources": {"claims": [{"name": "gpu"}]}}


class Devices:
    """A driver of a test's own: its name, its class and its slices are removed in the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: list[tuple[Resource, str]] = []
        self.driver = f"{cluster.namespace}.example.com"

    async def create(self, resource: Resource, kind: str, name: str, **fields: Any) -> None:
        """Create an object of the whole cluster."""
        metadata = {"name": name, "namespace": ""}
        await self._cluster.kube.create(
            resource, {"apiVersion": resource.api_version, "kind": kind, "metadata": metadata, **fields}
        )
        self._made.append((resource, name))

    async def add_class(self, **fields: Any) -> str:
        """Create a class of the driver's GPUs, and return its name."""
        expressions = [f'device.driver == "{self.driver}"', f'device.attributes["{self.driver}"].{GPU}']
        selectors = [{"cel": {"expression": " && ".join(expressions)}}]
        await self.create(DEVICE_CLASSES, "DeviceClass", self.driver, spec={"selectors": selectors, **fields})
        return self.driver

    async def add_slice(self, node: str, *memory: str, others: int = 0) -> None:
        """List a node's GPUs by their memory, and other devices."""
        devices: list[Body] = [
            {"name": f"gpu-{i}", "attributes": {"type": {"string": "gpu"}}, "capacity": {"memory": {"value": size}}}
            for i, size in enumerate(memory)
        ]
        devices += [{"name": f"link-{i}", "attributes": {"type": {"string": "link"}}} for i in range(others)]
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": self.driver, "nodeName": node, "pool": pool, "devices": devices}
        await self.create(RESOURCE_SLICES, "ResourceSlice", node, spec=spec)

    async def remove(self) -> None:
        """Delete what was created."""
        for resource, name in self._made:
            found = await self._cluster.kube.get(resource, None, name)
            await self._cluster.kube.delete(resource, "", name, uid=found["metadata"]["uid"])


@pytest.fixture
async def devices(cluster: Cluster) -> Any:
    """The devices of this test."""
    found = Devices(cluster)
    yield found
    await found.remove()


async def add_template(cluster: Cluster, *selectors: str, device_class: str, count: int = 1) -> Body:
    """Create a template of claims, and return the pod's field that claims by it."""
    exactly = {"deviceClassName": device_class, "count": count}
    if selectors:
        exactly["selectors"] = [{"cel": {"expression": each}} for each in selectors]
    body = {
        "apiVersion": RESOURCE_CLAIM_TEMPLATES.api_version,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "gpu", "namespace": cluster.namespace},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }
    await cluster.kube.create(RESOURCE_CLAIM_TEMPLATES, body)
    return {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}


async def add_foreign_pod(cluster: Cluster, name: str, claims: Body) -> None:
    """Run a pod of somebody else on the test's node, with a claim of its own."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": cluster.namespace},
        "spec": {
            **claims,
            "containers": [CONTAINER],
            "nodeSelector": {"ht-test": cluster.namespace},
            "tolerations": [{"key": "ht-test", "operator": "Exists"}],
        },
    }
    await cluster.kube.create(PODS, body)

    async def placed() -> bool:
        return bool((await cluster.kube.get(PODS, cluster.namespace, name))["spec"].get("nodeName"))

    await until(placed, "the foreign pod has its device")


def template(claims: Body) -> Body:
    """Return a job's template whose container uses the claim."""
    return {"spec": {**claims, "containers": [CONTAINER]}}


async def created_pods(operator: Operator) -> float:
    """Return the number of pods that the operator has ever created."""
    return await operator.metric("heterotrain_operator_pods_created_total") or 0


async def one_waits(cluster: Cluster, *, of: int) -> None:
    """Wait until one of so many workers has no node."""

    async def probe() -> bool:
        conditions = [each for pod in (await cluster.pods()).values() for each in pod["status"].get("conditions", ())]
        return sum(each.get("reason") == "Unschedulable" for each in conditions) == 1

    await until(probe, "one worker is unschedulable")
    assert len(await cluster.pods()) == of


async def test_no_more_workers_are_created_than_their_claims_leave_devices_for(
    cluster: Cluster, operator: Operator, devices: Devices
) -> None:
    """Four of five GPUs are large enough, and others have two; the node's cores would do for sixteen workers."""
    before = await created_pods(operator)
    node = await cluster.add_node("a", cpu="16")
    large = f'device.capacity["{devices.driver}"].memory.compareTo(quantity("40Gi")) >= 0'
    await devices.add_slice(node, "24Gi", "80Gi", "40Gi", "80Gi", "40Gi", others=3)
    claims = await add_template(cluster, large, device_class=await devices.add_class())
    await add_foreign_pod(cluster, "foreign-a", claims)
    await add_foreign_pod(cluster, "foreign-b", claims)
    await cluster.create(cluster.job(cluster.pool("a", maxReplicas=8, resources={}), template=template(claims)))
    await cluster.scheduled(2)
    await one_waits(cluster, of=3)
    assert await created_pods(operator) - before == 3, "one more than fit, never another"
    held = [each async for each in cluster.kube.list(RESOURCE_CLAIMS, cluster.namespace)]
    assert sum(bool((each.get("status") or {}).get("allocation")) for each in held) == 4


async def test_a_resource_that_a_class_offers_counts_as_its_devices(
    cluster: Cluster, operator: Operator, devices: Devices
) -> None:
    """The workers request a resource as from a device plugin, but a driver offers it: no node's kubelet counts it."""
    node = await cluster.add_node("a", cpu="16")
    await devices.add_slice(node, "80Gi", "80Gi", others=3)
    extended = f"{cluster.namespace}.example.com/gpu"
    await devices.add_class(extendedResourceName=extended)
    await cluster.create(cluster.job(cluster.pool("a", maxReplicas=8, resources={"limits": {extended: "1"}})))
    await cluster.scheduled(2)
    await one_waits(cluster, of=3)
    found = [each async for each in cluster.kube.list(RESOURCE_CLAIMS, cluster.namespace)]
    assert all(EXTENDED_RESOURCE_CLAIM in each["metadata"]["annotations"] for each in found)
