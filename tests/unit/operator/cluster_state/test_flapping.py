"""Holds on nodes that flap: after a few losses, growing, bounded, and never on most of a cluster."""

from __future__ import annotations

import itertools
import json

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


def test_a_successor_knows_what_the_operator_knew() -> None:
    """The hold goes on, and the next loss doubles it."""
    first, second = FlapHistory(), FlapHistory()
    for second_s in range(FLAPS):
        hold = flap(first, "n", float(second_s))
    flap(first, "once", 2.0)
    first.note("steady", ready=True, nodes=9, now_s=2.0)
    text = first.to_text(now_s=10.0)
    assert "steady" not in text
    assert second.restore(text, nodes=9, now_s=10.0) == ("n",)
    assert second.note("n", ready=True, nodes=9, now_s=11.0) == hold
    again = flap(second, "n", 12.0)
    assert again == Hold(FLAPS + 1, 12.0 + 2 * FIRST_HOLD_S)
    assert second.restore(text, nodes=9, now_s=13.0) == ()
    assert first.to_text(now_s=WINDOW_S + FIRST_HOLD_S + 100) == ""


@pytest.mark.parametrize(
    "text",
    ["", "x", "{}", "5", "[5]", "[[]]", "[" * 100_000, '[["n",3,0]]', '[["n",-1,0,99]]', '[["n",true,0,99]]',
     '[["n",3,NaN,99]]', '[["n",3,0,Infinity]]', "[[5,3,0,99]]", f'[["{"n" * 300}",3,0,99]]'],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_text_that_is_not_a_history_is_left_out(text: str) -> None:
    history = FlapHistory()
    assert history.restore(text, nodes=9, now_s=10.0) == ()
    assert history._records == {}


def test_no_text_holds_a_node_for_long_or_most_of_a_cluster() -> None:
    history = FlapHistory()
    held = history.restore(json.dumps([[f"n{n}", 9, 1e300, 1e300] for n in range(9)]), nodes=9, now_s=10.0)
    assert len(held) == 3
    assert history.note("n0", ready=True, nodes=9, now_s=10.0) == Hold(9, 10.0 + LONGEST_HOLD_S)


def test_the_store_of_a_new_leader_leaves_out_the_nodes_of_the_one_before() -> None:
    first, second = Store(lambda: 0.0), Store(lambda: 60.0)
    version = itertools.count(1)
    for store, states in ((first, ("True", *("Unknown", "True") * FLAPS)), (second, ("True",))):
        for name in ("b", "c", "a"):
            for ready in states if name == "a" else ("True",):
                body = node_body(name, "a", ready=ready)
                body["metadata"]["resourceVersion"] = str(next(version))
                store.nodes.put(parse_node(body))
    assert second.nodes.inherit(first.nodes.losses()) == ("a",)
    held = second.nodes.get("a")
    assert held is not None
    assert held.hold == Hold(FLAPS, FIRST_HOLD_S)
    assert list(second.nodes.held) == ["a"]
