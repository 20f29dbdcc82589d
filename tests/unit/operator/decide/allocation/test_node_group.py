"""Node groups do not overlap, count in whole numbers, and leave out resources that are never scarce."""

from __future__ import annotations

from heterotrain_operator.cluster_state.parse import parse_node
from heterotrain_operator.cluster_state.views import JobKey, NodeView
from heterotrain_operator.decide.allocation.node_group import NodeGroup, PoolKey, node_groups
from heterotrain_operator.decide.workers.capacity import Shape
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.problem import Pool
from support.fake_cluster import node_body


def pool_key(job: str, pool: str = "p") -> PoolKey:
    return PoolKey(JobKey("ns", job), pool)


def shape(selector: dict[str, str], **requests: float) -> Shape:
    return Shape(requests={"pods": 1.0, **requests}, node_selector=selector, tolerations=())


def some_nodes(*names: str, **fields: object) -> dict[str, NodeView]:
    return {
        name: parse_node(node_body(name, name.rstrip("0123456789"), **fields))  # type: ignore[arg-type]  # passed through
        for name in names
    }


def by_name(found: tuple[NodeGroup, ...]) -> dict[str, set[PoolKey]]:
    return {group.name: set(group.sizes) for group in found}


def test_a_pool_without_a_selector_is_in_every_node_group_and_others_in_their_own() -> None:
    pool_keys = {
        pool_key("any"): shape({}, cpu=1.0),
        pool_key("one", "a"): shape({"pool": "a"}, cpu=1.0),
        pool_key("two", "b"): shape({"pool": "b"}, cpu=1.0),
    }
    found = node_groups(pool_keys, some_nodes("a1", "a2", "b1", "c1"), {})
    assert by_name(found) == {
        "a1": {pool_key("any"), pool_key("one", "a")},
        "b1": {pool_key("any"), pool_key("two", "b")},
        "c1": {pool_key("any")},
    }
    assert set(found[0].nodes) == {"a1", "a2"}


def test_nodes_that_take_no_workers_are_in_no_node_group() -> None:
    nodes = {
        **some_nodes("a1", unschedulable=True),
        **some_nodes("a2", taints=["k:NoSchedule"]),
        **some_nodes("a3", ready="Unknown"),
        **some_nodes("a4"),
    }
    (found,) = node_groups({pool_key("one"): shape({"pool": "a"}, cpu=1.0)}, nodes, {})
    assert set(found.nodes) == {"a4"}


def test_only_the_resource_that_always_runs_out_first_counts() -> None:
    """Workers need little memory and 1 or 1.5 of 4 cores, of which 1 is used: the unit is half a core."""
    pool_keys = {
        pool_key("one"): shape({}, cpu=1.0, memory=2.0**20),
        pool_key("two"): shape({}, cpu=1.5, memory=2.0**20),
    }
    (found,) = node_groups(pool_keys, some_nodes("a1"), {"a1": {"cpu": 1.0}})
    assert found.nodes == {"a1": (6,)}
    assert found.sizes == {pool_key("one"): (2,), pool_key("two"): (3,)}


def test_a_remainder_below_the_smallest_unit_does_not_count() -> None:
    (found,) = node_groups({pool_key("one"): shape({}, cpu=0.28)}, some_nodes("a1", cpu="1"), {"a1": {"cpu": 0.1}})
    assert found.nodes == {"a1": (3,)}
    assert found.sizes == {pool_key("one"): (1,)}


def test_workers_with_different_needs_fit_side_by_side() -> None:
    """One worker uses nearly all memory, the other nearly all processors: they do not compete."""
    pool_keys = {
        pool_key("one"): shape({}, cpu=0.1, memory=7 * 2.0**30),
        pool_key("two"): shape({}, cpu=3.5, memory=2.0**20),
    }
    (found,) = node_groups(pool_keys, some_nodes("a1"), {})
    occupancy = Occupancy(PoolCapacity([Pool(name="g", nodes=tuple(found.nodes.values()))]))
    one, two = (found.sizes[pool_key(name)] for name in ("one", "two"))
    assert occupancy.fits({("g", one): 1, ("g", two): 1})
    assert not occupancy.fits({("g", one): 2})
    assert not occupancy.fits({("g", two): 2})


def test_a_resource_that_a_node_does_not_have_leaves_no_room() -> None:
    (found,) = node_groups({pool_key("one"): shape({}, **{"nvidia.com/gpu": 1.0})}, some_nodes("a1"), {})
    capacity = PoolCapacity([Pool(name="g", nodes=tuple(found.nodes.values()))])
    assert capacity.slots("g", found.sizes[pool_key("one")]) == 0


def test_a_request_below_every_unit_counts_as_one_unit() -> None:
    """``ephemeral-storage: "0.1n"`` passes the API server's checks."""
    tiny = shape({"pool": "a"}, **{"cpu": 1.0, "ephemeral-storage": 1e-10})
    (found,) = node_groups({pool_key("one"): tiny}, some_nodes("a1"), {})
    assert found.sizes[pool_key("one")]
