"""Claimed devices as resources: what claims ask for, what slices list, and what others hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from heterotrain_operator.cluster_state.quantity import (
    CLASS_PREFIX,
    MOST_OF_ONE_CLAIM,
    more_requests,
    text_of_more_requests,
)
from heterotrain_operator.decide.plugins.claimed_devices.devices import (
    EXTENDED_RESOURCE_CLAIM,
    UNCOUNTED,
    Allocated,
    DeviceRequest,
    Offer,
    allocated,
    amounts,
    devices_of,
    held_by_others,
    requests_of_claim,
)
from hypothesis import given
from hypothesis import strategies as st

GPU = DeviceRequest("gpu")
LARGE = DeviceRequest("gpu", ("large",))


def claim(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"devices": {"requests": [{"name": f"r{i}", **each} for i, each in enumerate(requests)]}}


def exactly(name: str = "gpu", **fields: Any) -> dict[str, Any]:
    return {"exactly": {"deviceClassName": name, **fields}}


def slice_of(node: str, *devices: dict[str, Any], generation: int = 1, pool: str = "", **spec: Any) -> dict[str, Any]:
    pool_of = {"name": pool or node, "generation": generation, "resourceSliceCount": 1}
    return {
        "metadata": {"resourceVersion": "7"},
        "spec": {"driver": "example.com", "nodeName": node, "pool": pool_of, "devices": list(devices), **spec},
    }


def test_requests_are_summed_by_class_and_selectors() -> None:
    large = [{"cel": {"expression": "large"}}]
    spec = claim(exactly(), exactly(count=3), exactly("nic"), exactly(count=2, selectors=large))
    assert requests_of_claim(spec) == {GPU: 4, DeviceRequest("nic"): 1, LARGE: 2}
    assert GPU.resource == f"{CLASS_PREFIX}gpu"
    assert LARGE.resource.startswith(f"{CLASS_PREFIX}gpu?")
    assert len({GPU.resource, LARGE.resource, DeviceRequest("gpu", ("other",)).resource}) == 3
    assert DeviceRequest("gpu", extended="example.com/gpu").resource == "example.com/gpu"


def test_what_only_the_scheduler_can_count_is_left_to_it() -> None:
    spec = claim(exactly(allocationMode="All"), exactly(adminAccess=True), {"firstAvailable": [{"name": "a"}]})
    assert requests_of_claim(spec) == {}
    assert requests_of_claim({}) == {}


@pytest.mark.parametrize(
    "spec",
    [
        claim(exactly(count=MOST_OF_ONE_CLAIM + 1)),
        claim(exactly(count=0)),
        claim({"exactly": {"count": 1}}),
        claim(exactly(selectors=[{}])),
        {"devices": {"requests": ["text"]}},
        {"devices": "text"},
    ],
)
def test_a_claim_that_no_api_server_would_accept_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"claim|Claim"):
        requests_of_claim(spec)


def test_devices_are_those_of_the_newest_generation_without_taints() -> None:
    tainted = {"name": "c", "taints": [{"key": "broken", "effect": "NoSchedule"}]}
    found = devices_of(
        [
            slice_of("n1", {"name": "old"}, generation=1),
            slice_of("n1", {"name": "a"}, tainted, generation=2),
            slice_of("n1", {"name": "b"}, generation=2),
            slice_of("n2", {"name": "a"}, generation=1),
            slice_of("", {"name": "anywhere"}, allNodes=True),
            {"metadata": {}, "spec": {}},
        ]
    )
    assert [device.key for device in found] == [
        ("example.com", "n1", "a"),
        ("example.com", "n1", "b"),
        ("example.com", "n2", "a"),
    ]


def test_attributes_without_a_domain_are_in_that_of_the_driver() -> None:
    device = {
        "name": "a",
        "attributes": {
            "kind": {"string": "gpu"},
            "other.org/index": {"int": 3},
            "ok": {"bool": False},
            "driverVersion": {"version": "1.2.3"},
        },
        "capacity": {"memory": {"value": "80Gi"}, "other.org/slots": {"value": "7"}},
    }
    (found,) = devices_of([slice_of("n1", device)])
    assert found.attributes == {
        "example.com": {"kind": "gpu", "ok": False, "driverVersion": "1.2.3"},
        "other.org": {"index": 3},
    }
    assert found.capacity == {"example.com": {"memory": "80Gi"}, "other.org": {"slots": "7"}}
    assert (found.node, found.version) == ("n1", "7")


def test_amounts_count_by_node_and_kind_and_kinds_that_cannot_be_counted_are_no_limit() -> None:
    offers = [Offer("n1", (GPU,)), Offer("n1", (GPU, LARGE)), Offer("n2", (GPU,))]
    assert amounts(offers, uncounted=[], nodes=["n1", "n2", "n3"]) == {
        "n1": {GPU.resource: 2.0, LARGE.resource: 1.0},
        "n2": {GPU.resource: 1.0},
    }
    nic = DeviceRequest("nic")
    found = amounts(offers, uncounted=[nic], nodes=["n1", "n2", "n3"])
    assert {node: each[nic.resource] for node, each in found.items()} == dict.fromkeys(("n1", "n2", "n3"), UNCOUNTED)


def test_devices_of_workers_are_not_counted_a_second_time() -> None:
    extended = DeviceRequest("gpu", extended="example.com/gpu")
    keys = [("example.com", "n1", name) for name in "abc"]
    offers = {key: Offer("n1", (GPU, extended)) for key in keys}
    claims = [
        Allocated("team", frozenset({"job-w0"}), (keys[0],), extended=False),
        Allocated("team", frozenset({"foreign"}), (keys[1], ("other", "n9", "x")), extended=False),
        Allocated("team", frozenset({"by-name"}), (keys[2],), extended=True),
    ]
    found = held_by_others(offers, claims, lambda namespace, pod: (namespace, pod) == ("team", "job-w0"))
    assert found == {"n1": {GPU.resource: 2.0, "example.com/gpu": 1.0}}, "a request by name is part of the pod's own"


def test_an_allocation_is_read_with_its_pods() -> None:
    result = {"driver": "d", "pool": "p", "device": "x", "request": "r"}
    body = {
        "metadata": {"namespace": "team", "name": "c", "annotations": {EXTENDED_RESOURCE_CLAIM: "true"}},
        "status": {
            "allocation": {"devices": {"results": [result, {**result, "device": "y", "adminAccess": True}]}},
            "reservedFor": [{"resource": "pods", "name": "a"}, {"resource": "others", "name": "b"}],
        },
    }
    assert allocated(body) == Allocated("team", frozenset({"a"}), (("d", "p", "x"),), extended=True)
    assert allocated({"metadata": {"namespace": "team"}}) is None
    assert allocated({"metadata": {"namespace": "team"}, "status": {"allocation": {"devices": "text"}}}) is None


def test_the_annotation_brings_devices_back_and_nothing_else() -> None:
    requests = {"cpu": 2.0, GPU.resource: 2.0, LARGE.resource: 1.0}
    assert more_requests(text_of_more_requests(requests)) == {GPU.resource: 2.0, LARGE.resource: 1.0}
    assert text_of_more_requests({"cpu": 1.0}) == ""
    assert more_requests(f'{{"cpu": 1, "{GPU.resource}": 1}}') == {GPU.resource: 1.0}


@given(text=st.one_of(st.text(), st.sampled_from(["[]", "[" * 8000, '{"a": 1}', "1", f'{{"{GPU.resource}": 1e9}}'])))
def test_any_text_may_be_in_the_annotation(text: str) -> None:
    assert more_requests(text) == {}


@pytest.mark.parametrize("count", [0, -1, 10**9, "1", 1.5, None])
def test_an_annotation_with_an_impossible_number_counts_nothing(count: object) -> None:
    assert more_requests(json.dumps({GPU.resource: count})) == {}
