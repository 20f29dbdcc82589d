"""The operator counts devices that workers claim, as soon as a job asks for them and as long as it can."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.cluster_state.parse import parse_node
from heterotrain_operator.cluster_state.quantity import CLASS_PREFIX
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.decide.plugins.claimed_devices.devices import UNCOUNTED, Device
from heterotrain_operator.decide.plugins.claimed_devices.expressions import Expressions, UnknownExpressionError
from heterotrain_operator.engine.plugins.claimed_devices import MOST_KINDS, DeviceReader
from heterotrain_operator.kube.errors import KubeError, NotFound, Rejected, Unavailable
from support.executors import at_once
from support.fakes import FakeKube

DRIVER = "gpu.example.com"
GPU = f"{CLASS_PREFIX}gpu"
CLAIMS = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}


def put(kube: FakeKube, plural: str, name: str, namespace: str = "", **fields: Any) -> None:
    metadata = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": str(len(kube.objects))}
    kube.objects[plural, namespace, name] = {"metadata": metadata, **fields}


def cluster(kube: FakeKube, *, expression: str = f'device.driver == "{DRIVER}"', gpus: int = 3) -> Store:
    """A node with some GPUs, another one without, and a template for one GPU."""
    store = Store()
    for name in ("a", "b"):
        body = {"metadata": {"name": name, "resourceVersion": "1"}, "status": {"allocatable": {"cpu": "8"}}}
        store.nodes.put(parse_node(body))
    put(kube, "deviceclasses", "gpu", spec={"selectors": [{"cel": {"expression": expression}}]})
    pool = {"name": "a", "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": f"gpu-{i}", "attributes": {"index": {"int": i}}} for i in range(gpus)]
    put(kube, "resourceslices", "a", spec={"driver": DRIVER, "nodeName": "a", "pool": pool, "devices": devices})
    add_template(kube, "gpu")
    return store


def add_template(kube: FakeKube, name: str, *selectors: str, count: int = 1) -> dict[str, Any]:
    exactly = {"deviceClassName": "gpu", "count": count, "selectors": [{"cel": {"expression": e}} for e in selectors]}
    spec = {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}
    put(kube, "resourceclaimtemplates", name, "team", spec=spec)
    return {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": name}]}


def allocatable(store: Store, node: str = "a") -> dict[str, float]:
    found = store.nodes.get(node)
    assert found is not None
    return dict(found.allocatable)


async def test_nothing_is_read_before_a_job_claims_devices() -> None:
    kube = FakeKube()
    store = cluster(kube)
    reader = DeviceReader(kube, store, at_once())
    assert await reader.requests_of("team", {"containers": [{"resources": {"requests": {"cpu": "1"}}}]}) == {}
    assert await reader.refresh() == ()
    assert kube.calls == []


async def test_the_first_claim_counts_the_devices_of_each_node() -> None:
    kube = FakeKube()
    store = cluster(kube)
    reader = DeviceReader(kube, store, at_once())
    assert await reader.requests_of("team", CLAIMS) == {GPU: 1.0}
    assert allocatable(store) == {"cpu": 8.0, GPU: 3.0}
    assert allocatable(store, "b") == {"cpu": 8.0}
    before = len(kube.calls)
    assert await reader.requests_of("team", CLAIMS) == {GPU: 1.0}
    assert [call[0] for call in kube.calls[before:]] == ["get"], "a known kind is not counted again at once"


async def test_changed_slices_and_nodes_keep_the_numbers_right() -> None:
    kube = FakeKube()
    store = cluster(kube)
    reader = DeviceReader(kube, store, at_once())
    await reader.requests_of("team", CLAIMS)
    newer = {"metadata": {"name": "a", "resourceVersion": "2"}, "status": {"allocatable": {"cpu": "4"}}}
    store.nodes.put(parse_node(newer))
    assert allocatable(store) == {"cpu": 4.0, GPU: 3.0}, "the kubelet's report leaves the devices"
    kube.objects["resourceslices", "", "a"]["spec"]["devices"].pop()
    kube.objects["resourceslices", "", "a"]["metadata"]["resourceVersion"] = "99"
    assert await reader.refresh() == ("a",)
    assert allocatable(store) == {"cpu": 4.0, GPU: 2.0}
    assert await reader.refresh() == ()
    del kube.objects["deviceclasses", "", "gpu"]
    await reader.refresh()
    assert allocatable(store) == {"cpu": 4.0}, "without its class, no device is of it"


async def test_devices_that_foreign_pods_hold_are_used() -> None:
    kube = FakeKube()
    store = cluster(kube)
    for name, device in (("theirs", "gpu-0"), ("gone", "gpu-9")):
        results = [{"driver": DRIVER, "pool": "a", "device": device}]
        status = {"allocation": {"devices": {"results": results}}, "reservedFor": [{"resource": "pods", "name": name}]}
        put(kube, "resourceclaims", name, "other", status=status)
    await DeviceReader(kube, store, at_once()).requests_of("team", CLAIMS)
    assert store.used()["a"] == {GPU: 1.0}


@pytest.mark.parametrize("error", [Rejected("forbidden", status_code=403), Unavailable("no answer")])
async def test_without_the_right_to_list_them_devices_limit_nothing(error: KubeError) -> None:
    kube = FakeKube()
    store = cluster(kube)
    kube.fail = lambda verb, plural, _: error if (verb, plural) == ("list", "resourceslices") else None
    reader = DeviceReader(kube, store, at_once())
    assert await reader.requests_of("team", CLAIMS) == {GPU: 1.0}
    assert allocatable(store)[GPU] == allocatable(store, "b")[GPU] == UNCOUNTED
    kube.fail = lambda *_: None
    assert set(await reader.refresh()) == {"a", "b"}
    assert (allocatable(store)[GPU], GPU in allocatable(store, "b")) == (3.0, False)
    kube.fail = lambda verb, *_: error if verb == "list" else None
    await reader.refresh()
    assert allocatable(store)[GPU] == 3.0, "after a failed list, the numbers stay"


@pytest.mark.parametrize("expression", ["device.unheardOf()", "1 +", "cel.bind(x, device, x.driver == 'a')"])
async def test_an_expression_that_cannot_be_evaluated_limits_nothing(expression: str) -> None:
    kube = FakeKube()
    store = cluster(kube, expression=expression)
    assert await DeviceReader(kube, store, at_once()).requests_of("team", CLAIMS) == {GPU: 1.0}
    assert allocatable(store)[GPU] == UNCOUNTED


async def test_a_cluster_without_such_devices_is_as_before() -> None:
    kube = FakeKube()
    store = cluster(kube)
    kube.fail = lambda _, plural, __: NotFound(plural) if plural.startswith(("resource", "device")) else None
    assert await DeviceReader(kube, store, at_once()).requests_of("team", CLAIMS) == {}
    assert allocatable(store) == {"cpu": 8.0}


async def test_selectors_of_one_template_do_not_count_for_another() -> None:
    kube = FakeKube()
    store = cluster(kube)
    reader = DeviceReader(kube, store, at_once())
    large = add_template(kube, "large", f'device.attributes["{DRIVER}"].index >= 1', count=2)
    await reader.requests_of("team", CLAIMS)
    (resource,) = await reader.requests_of("team", large)
    assert allocatable(store) == {"cpu": 8.0, GPU: 3.0, resource: 2.0}


async def test_a_resource_that_a_class_offers_is_counted_where_no_kubelet_does() -> None:
    kube = FakeKube()
    store = cluster(kube)
    kube.objects["deviceclasses", "", "gpu"]["spec"]["extendedResourceName"] = "example.com/gpu"
    spec = {"containers": [{"resources": {"limits": {"example.com/gpu": "1", GPU: "1"}}}]}
    assert await DeviceReader(kube, store, at_once()).requests_of("team", spec) == {}, (
        "they are part of the containers' requests"
    )
    assert allocatable(store) == {"cpu": 8.0, "example.com/gpu": 3.0, GPU: 3.0}


async def test_the_number_of_kinds_is_bounded() -> None:
    kube = FakeKube()
    store = cluster(kube)
    reader = DeviceReader(kube, store, at_once())
    for number in range(MOST_KINDS + 3):
        own = add_template(kube, f"t{number}", f'device.attributes["{DRIVER}"].index == {number}')
        assert bool(await reader.requests_of("team", own)) == (number < MOST_KINDS)


def test_expressions_have_the_quantities_and_versions_of_kubernetes() -> None:
    attributes = {DRIVER: {"model": "A100-SXM4", "driverVersion": "12.10.3", "index": 3, "ok": True}}
    device = Device((DRIVER, "a", "gpu-0"), "a", "1", attributes, {DRIVER: {"memory": "80Gi"}})
    own, memory = f'device.attributes["{DRIVER}"]', f'device.capacity["{DRIVER}"].memory'
    known = Expressions()
    for expression in (
        f'device.driver == "{DRIVER}" && {own}.model.startsWith("A100")',
        f'{own}.driverVersion.compareTo(semver("12.9.0")) > 0',
        f'{own}.driverVersion.isGreaterThan(semver("12.10.2"))',
        f'{memory}.compareTo(quantity("40Gi")) >= 0',
        f'{memory}.isLessThan(quantity("0.1Ti"))',
        f"{own}.index in [1, 3] && {own}.ok",
        '!("other.com" in device.attributes) || device.attributes["other.com"].x == 1',
    ):
        assert known.all_true([expression], device), expression
    assert not known.all_true([f'{memory}.isGreaterThan(quantity("80Gi"))'], device)
    assert not known.all_true(['device.attributes["other.com"].x == 1'], device), "it has no such attribute"
    with pytest.raises(UnknownExpressionError, match="version"):
        known.all_true([f'{own}.driverVersion.isLessThan(semver("1.0.0-rc1"))'], device)
