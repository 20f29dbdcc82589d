"""Holds on nodes that flap: after a few losses, growing, bounded, and never on most of a cluster."""

from __future__ import annotations

import itertools

import pytest
from heterotrain_operator.cluster_state.flapping import (
    FIRST_HOLD_S,
    FLAPS,
    LONGEST_HOLD_S,
    WINDOW_S,
    FlapHistory,
    Hold,
)
from heterotrain_operator.cluster_state.parse import parse_node
from heterotrain_operator.cluster_state.store import Store
from support.fake_cluster import node_body


def flap(history: FlapHistory, name: str, now_s: float, *, nodes: int = 9) -> Hold | None:
    """Let a node be lost and come back at once."""
    history.note(name, ready=True, nodes=nodes, now_s=now_s)
    history.note(name, ready=False, nodes=nodes, now_s=now_s)
    return history.note(name, ready=True, nodes=nodes, now_s=now_s)


def test_a_hold_begins_with_the_third_loss_and_doubles_up_to_a_bound() -> None:
    history, now_s, holds = FlapHistory(), 1000.0, []
    for _ in range(FLAPS + 8):
        hold = flap(history, "n", now_s)
        holds.append(hold.until_s - now_s if hold else 0.0)
        now_s += (hold.until_s - now_s if hold else 0.0) + 30
    growing = [FIRST_HOLD_S * 2**power for power in range(4)]
    assert holds == [0, 0, *growing, *[LONGEST_HOLD_S] * (len(holds) - 2 - len(growing))]


def test_rare_losses_are_no_flapping() -> None:
    history = FlapHistory()
    assert not any(flap(history, "n", number * (WINDOW_S + 1)) for number in range(1, 20))


def test_a_steady_node_is_forgiven() -> None:
    history, now_s = FlapHistory(), 0.0
    for _ in range(6):
        now_s += 1
        hold = flap(history, "n", now_s)
    assert hold is not None
    assert hold.flaps == 6
    now_s = hold.until_s + WINDOW_S + 1
    assert flap(history, "n", now_s) is None


@pytest.mark.parametrize(("nodes", "most"), [(1, 0), (2, 0), (3, 1), (9, 3)])
def test_most_nodes_of_a_cluster_are_never_held(nodes: int, most: int) -> None:
    history = FlapHistory()
    names = [f"n{number}" for number in range(nodes)]
    for second, name in itertools.product(range(10), names):
        flap(history, name, float(second), nodes=nodes)
    held = [name for name in names if history.note(name, ready=True, nodes=nodes, now_s=10.0) is not None]
    assert len(held) == most


def test_a_hold_ends_and_nodes_that_are_gone_are_forgotten() -> None:
    history = FlapHistory()
    for second in range(FLAPS):
        hold = flap(history, "n", float(second))
    assert hold is not None
    assert history.expired({"n"}, now_s=hold.until_s - 1) == ()
    assert history.expired({"n"}, now_s=hold.until_s) == ("n",)
    assert history.expired({"n"}, now_s=hold.until_s) == ()
    assert history.expired(set(), now_s=hold.until_s + LONGEST_HOLD_S) == ()
    assert history._records == {}


def test_the_store_notices_losses_by_events_lists_and_deletions() -> None:
    now = [0.0]
    store = Store(lambda: now[0])
    version = itertools.count(1)

    def put(name: str, ready: str = "True") -> None:
        body = node_body(name, "a", ready=ready)
        body["metadata"]["resourceVersion"] = str(next(version))
        store.nodes.put(parse_node(body))

    for name in ("a", "b", "c"):
        put(name)
    put("a", "Unknown")
    put("a")
    store.nodes.discard("a")
    put("a")
    for ready in ("False", "True"):  # seen in full lists, after a gap of the watch
        since = store.nodes.begin_list()
        bodies = [node_body(name, "a", ready=ready if name == "a" else "True") for name in ("a", "b", "c")]
        for body in bodies:
            body["metadata"]["resourceVersion"] = str(next(version))
        store.nodes.replace([parse_node(body) for body in bodies], since=since)
    assert list(store.nodes.held) == ["a"]
    held = store.nodes.get("a")
    assert held is not None
    assert held.hold == Hold(FLAPS, FIRST_HOLD_S)
    assert store.nodes.release() == ()
    now[0] = FIRST_HOLD_S
    assert store.nodes.release() == ("a",)
    assert store.nodes.held == {}
    after = store.nodes.get("a")
    assert after is not None
    assert after.hold is None
