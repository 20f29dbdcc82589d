"""Which nodes jobs compete for: grounds are apart, in whole numbers, and leave out what never decides."""

from __future__ import annotations

from heterotrain_core.allocate.capacity import Room
from heterotrain_core.allocate.problem import Pool
from heterotrain_operator.cluster_state.parse import parse_node
from heterotrain_operator.cluster_state.views import JobKey, NodeView
from heterotrain_operator.decide.allocation.node_group import Claim, Ground, grounds
from heterotrain_operator.decide.workers.capacity import Shape
from support.fake_cluster import node_body


def claim(job: str, pool: str = "p") -> Claim:
    return Claim(JobKey("ns", job), pool)


def shape(selector: dict[str, str], **requests: float) -> Shape:
    return Shape(requests={"pods": 1.0, **requests}, node_selector=selector, tolerations=())


def some_nodes(*names: str, **fields: object) -> dict[str, NodeView]:
    return {name: parse_node(node_body(name, name.rstrip("0123456789"), **fields)) for name in names}  # type: ignore[arg-type]  # as the builder takes them


def by_name(found: tuple[Ground, ...]) -> dict[str, set[Claim]]:
    return {ground.name: set(ground.sizes) for ground in found}


def test_a_pool_without_a_selector_stands_on_every_ground_and_others_on_their_own() -> None:
    claims = {
        claim("any"): shape({}, cpu=1.0),
        claim("one", "a"): shape({"pool": "a"}, cpu=1.0),
        claim("two", "b"): shape({"pool": "b"}, cpu=1.0),
    }
    found = grounds(claims, some_nodes("a1", "a2", "b1", "c1"), {})
    assert by_name(found) == {
        "a1": {claim("any"), claim("one", "a")},
        "b1": {claim("any"), claim("two", "b")},
        "c1": {claim("any")},
    }
    assert set(found[0].nodes) == {"a1", "a2"}


def test_nodes_that_take_nobody_are_on_no_ground() -> None:
    nodes = {
        **some_nodes("a1", unschedulable=True),
        **some_nodes("a2", taints=["k:NoSchedule"]),
        **some_nodes("a3", ready="Unknown"),
        **some_nodes("a4"),
    }
    (found,) = grounds({claim("one"): shape({"pool": "a"}, cpu=1.0)}, nodes, {})
    assert set(found.nodes) == {"a4"}


def test_one_resource_that_always_runs_out_first_is_all_that_counts() -> None:
    """Workers of a quarter and a half of a node in processors, little memory: 4 cores in units of half a core, 1 taken."""
    claims = {claim("one"): shape({}, cpu=1.0, memory=2.0**20), claim("two"): shape({}, cpu=1.5, memory=2.0**20)}
    (found,) = grounds(claims, some_nodes("a1"), {"a1": {"cpu": 1.0}})
    assert found.nodes == {"a1": (6,)}
    assert found.sizes == {claim("one"): (2,), claim("two"): (3,)}


def test_what_is_left_over_below_the_smallest_unit_does_not_count() -> None:
    (found,) = grounds({claim("one"): shape({}, cpu=0.28)}, some_nodes("a1", cpu="1"), {"a1": {"cpu": 0.1}})
    assert found.nodes == {"a1": (3,)}
    assert found.sizes == {claim("one"): (1,)}


def test_different_needs_stay_apart_so_that_they_can_stand_side_by_side() -> None:
    """One worker fills the memory, the other the processors: neither is in the other's way."""
    claims = {claim("one"): shape({}, cpu=0.1, memory=7 * 2.0**30), claim("two"): shape({}, cpu=3.5, memory=2.0**20)}
    (found,) = grounds(claims, some_nodes("a1"), {})
    room = Room([Pool(name="g", nodes=tuple(found.nodes.values()))])
    one, two = (found.sizes[claim(name)] for name in ("one", "two"))
    assert room.fits({("g", one): 1, ("g", two): 1})
    assert not room.fits({("g", one): 2})
    assert not room.fits({("g", two): 2})


def test_a_resource_that_a_node_does_not_have_leaves_no_room() -> None:
    (found,) = grounds({claim("one"): shape({}, **{"nvidia.com/gpu": 1.0})}, some_nodes("a1"), {})
    room = Room([Pool(name="g", nodes=tuple(found.nodes.values()))])
    assert room.places("g", found.sizes[claim("one")]) == 0
