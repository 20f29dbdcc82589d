"""Free slots from an index: always those that a look at all nodes finds, at a cost of the changes only."""

from __future__ import annotations

import random

import pytest
from heterotrain_operator.cluster_state.parse import parse_node, parse_pod
from heterotrain_operator.cluster_state.quantity import pod_requests
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.decide.workers.capacity import Shape, free_slots
from heterotrain_operator.engine import slot_index
from heterotrain_operator.engine.slot_index import MOST_SHAPES, SlotIndex
from support.fake_cluster import FakeCluster, node_body


def a_shape(pool: str, cpu: float) -> Shape:
    return Shape(requests={"cpu": cpu, "pods": 1.0}, node_selector={"pool": pool}, tolerations=())


def test_the_index_agrees_with_a_look_at_all_nodes_after_any_change() -> None:
    rng = random.Random(1)  # noqa: S311  # a seeded history
    store, version = Store(), 1
    index = SlotIndex(store)
    pods = list(FakeCluster().with_nodes("a", "b", "c").start().pods.values())
    shapes = [a_shape(name, cpu) for name in "ab" for cpu in (1.0, 3.0, 9.0)]
    for _ in range(300):
        version += 1
        name = f"{rng.choice('ab')}{rng.randrange(4)}"
        match rng.randrange(6):
            case 0 | 1:
                body = node_body(name, name[0], ready=rng.choice(["True", "False"]), cpu=str(rng.randint(1, 16)))
                body["metadata"]["resourceVersion"] = str(version)
                store.nodes.put(parse_node(body))
            case 2:
                store.nodes.discard(name)
            case 3:
                pod = rng.choice(pods)
                pod["metadata"]["resourceVersion"] = str(version)
                pod["spec"]["nodeName"] = name
                pod["status"]["phase"] = rng.choice(["Running", "Failed"])
                view = parse_pod(pod)
                assert view is not None
                store.pods.put(view)
            case 4:
                store.foreign_requests = {name: {"cpu": float(rng.randint(0, 8))}}
            case _:
                store.nodes.replace(list(store.nodes.all().values())[:6], since=store.nodes.begin_list())
                store.pods.replace(list(store.pods.all().values())[:2], since=store.pods.begin_list())
        used = {
            node: {
                name: sum(p.requests[name] for p in store.pods.all().values() if p.node == node and not p.phase_ended)
                + store.foreign_requests.get(node, {}).get(name, 0.0)
                for name in ("cpu", "pods")
            }
            for node in store.nodes.all()
        }
        for shape in rng.sample(shapes, 2):
            assert index.free_slots(shape) == free_slots(shape, store.nodes.all().values(), used)


@pytest.mark.parametrize("nodes", [25, 100])
def test_a_change_of_one_pod_costs_one_node_however_many_there_are(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    for number in range(nodes):
        store.nodes.put(parse_node(node_body(f"a-{number}", "a", cpu="16")))
    index, shape = SlotIndex(store), a_shape("a", 1.0)
    index.free_slots(shape)
    looks: list[str] = []
    known = slot_index.slots_on
    monkeypatch.setattr(
        slot_index, "slots_on", lambda shape, node, taken: looks.append(node.name) or known(shape, node, taken)
    )
    index.free_slots(shape)
    assert looks == []
    pod = next(iter(FakeCluster().with_nodes("a", "b", "c").start().pods.values()))
    pod["spec"]["nodeName"] = "a-3"
    view = parse_pod(pod)
    assert view is not None
    store.pods.put(view)
    before = index.free_slots(shape).slots
    assert looks == ["a-3"]
    assert before == nodes * 10 - pod_requests(pod["spec"])["pods"], "each node takes ten pods"


def test_shapes_that_are_not_used_any_more_are_forgotten() -> None:
    index = SlotIndex(Store())
    for number in range(2 * MOST_SHAPES):
        index.free_slots(a_shape("a", float(number + 1)))
    assert len(index._entries) == MOST_SHAPES
