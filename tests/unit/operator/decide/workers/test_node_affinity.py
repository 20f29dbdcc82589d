"""Node affinity by Kubernetes' rules: in the capacity of a pool, between jobs, and for the watch of nodes."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.cluster_state.parse import parse_job, parse_node
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.allocation.node_group import PoolKey, node_groups
from heterotrain_operator.decide.objects.pods import selector_keys
from heterotrain_operator.decide.workers.capacity import Shape, free_slots, shape_of
from heterotrain_operator.decide.workers.node_affinity import MOST_REQUIREMENTS, REQUIRED, allows, required_terms
from heterotrain_operator.engine.slot_index import SlotIndex
from support.fake_cluster import Body, FakeCluster, job_body, node_body, pool

LABELS = {"zone": "a", "gpu": "t4", "count": "8", "text": "x"}


def affinity(*terms: Body) -> Body:
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}}


def label(key: str, operator: str, *values: str) -> Body:
    return {"key": key, "operator": operator, "values": list(values)}


def expressions(*found: Body) -> Body:
    return {"matchExpressions": list(found)}


@pytest.mark.parametrize(
    ("terms", "allowed"),
    [
        ([expressions(label("zone", "In", "a", "b"))], True),
        ([expressions(label("zone", "In", "b"))], False),
        ([expressions(label("rack", "In", "b"))], False),
        ([expressions(label("zone", "NotIn", "a"))], False),
        ([expressions(label("rack", "NotIn", "a"))], True),
        ([expressions(label("zone", "Exists"))], True),
        ([expressions(label("rack", "Exists"))], False),
        ([expressions(label("rack", "DoesNotExist"))], True),
        ([expressions(label("zone", "DoesNotExist"))], False),
        ([expressions(label("count", "Gt", "7"))], True),
        ([expressions(label("count", "Gt", "8"))], False),
        ([expressions(label("count", "Lt", "9"))], True),
        ([expressions(label("text", "Gt", "1"))], False),
        ([expressions(label("rack", "Lt", "1"))], False),
        ([expressions(label("count", "Gt"))], False),
        ([expressions(label("zone", "In", "a"), label("gpu", "In", "v100"))], False),
        ([expressions(label("gpu", "In", "v100")), expressions(label("zone", "In", "a"))], True),
        ([{"matchFields": [label("metadata.name", "In", "n")]}], True),
        ([{"matchFields": [label("metadata.name", "NotIn", "n")]}], False),
        ([{"matchFields": [label("metadata.name", "In", "n")], **expressions(label("gpu", "In", "v100"))}], False),
        ([{}], False),
        ([], False),
    ],
)
def test_a_node_meets_all_requirements_of_one_term(terms: list[Body], allowed: bool) -> None:
    assert allows(required_terms(affinity(*terms)), "n", LABELS) is allowed


MALFORMED: dict[str, Any] = {
    "a text": {"affinity": "zone a"},
    "a list": {"affinity": {"nodeAffinity": ["zone"]}},
    "no terms": {"affinity": {"nodeAffinity": {REQUIRED: {}}}},
    "terms as text": affinity() | {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": "zone"}}}},
    "no operator": affinity(expressions({"key": "zone"})),
    "an unknown operator": affinity(expressions(label("zone", "Is", "b"))),
    "values as a number": affinity(expressions({"key": "zone", "operator": "In", "values": 7})),
    "too much": affinity(expressions(*(label(f"k{number}", "Exists") for number in range(MOST_REQUIREMENTS + 1)))),
    "too many values": affinity(expressions(label("zone", "In", *map(str, range(1000))))),
    "none": {},
    "preferences only": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_an_affinity_that_is_not_understood_allows_every_node(case: str) -> None:
    assert required_terms(MALFORMED[case]) is None
    assert allows(None, "n", {})


def a_shape(*terms: Body) -> Shape:
    pod = {"spec": {"nodeSelector": {}, **affinity(*terms)}}
    return shape_of(pod, {"cpu": 1.0, "pods": 1.0})


ONLY_A = expressions(label("pool", "In", "a"))
NOT_A1 = {"matchFields": [label("metadata.name", "NotIn", "a1")]}


def test_only_nodes_that_the_affinity_allows_have_free_slots() -> None:
    nodes = [parse_node(node_body(name, name[0])) for name in ("a1", "a2", "b1")]
    found = free_slots(a_shape(ONLY_A), nodes, {})
    assert (found.slots, found.matching_nodes) == (8, 2)
    assert free_slots(a_shape({**ONLY_A, **NOT_A1}), nodes, {}).slots == 4


def test_the_index_tells_shapes_apart_by_their_affinity() -> None:
    store = Store()
    for name in ("a1", "a2", "b1"):
        store.nodes.put(parse_node(node_body(name, name[0])))
    index = SlotIndex(store)
    shapes = (a_shape(ONLY_A), a_shape(NOT_A1), a_shape({**ONLY_A, **NOT_A1}))
    assert [index.free_slots(shape).slots for shape in shapes] == [8, 8, 4]


def test_pools_of_different_affinity_do_not_share_nodes() -> None:
    first, second = (PoolKey(JobKey("ns", name), "p") for name in ("one", "two"))
    nodes = {name: parse_node(node_body(name, name[0])) for name in ("a1", "a2", "b1")}
    found = node_groups({first: a_shape(ONLY_A), second: a_shape(NOT_A1)}, nodes, {})
    assert {name: set(group.sizes) for group in found for name in group.nodes} == {
        "a1": {first},
        "a2": {first, second},
        "b1": {second},
    }


def test_labels_of_an_affinity_wake_the_job() -> None:
    job = parse_job(
        job_body(
            pool("plain"),
            pool("a", template={"spec": affinity(expressions(label("rack", "In", "7")), NOT_A1)}),
            template={"spec": {"containers": [{"name": "main"}], **affinity(expressions(label("zone", "Exists")))}},
        )
    )
    assert job.spec is not None, job.problem
    assert selector_keys(job) == {"pool", "zone", "rack"}


def test_workers_are_created_only_for_nodes_that_the_affinity_allows() -> None:
    """Nodes a1 and a2 hold four workers each."""
    own = {"spec": affinity({"matchFields": [label("metadata.name", "In", "a2")]})}
    cluster = FakeCluster(pool("a", maxReplicas=20, template=own)).with_nodes("a1", "a2")
    cluster.settle()
    assert len(cluster.pods) == 4
