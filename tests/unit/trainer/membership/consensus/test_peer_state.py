"""A member learns that its formation is over from a peer that refers to the next one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from heterotrain.membership.consensus.peer_state import PeerState
from heterotrain.membership.roster import FormationId


def alone() -> tuple[PeerState, Any, list[str]]:
    """Return the peer state of a rank without a network, its peers, and the reasons passed to ``on_broken``."""
    reasons: list[str] = []
    peers: Any = SimpleNamespace(
        identity=SimpleNamespace(worker_uid="u0", local_rank=0),
        heartbeats=SimpleNamespace(),
        handlers={},
        notify=lambda: None,
        subscribe=lambda **told: vars(peers).update(told),
    )
    return PeerState(peers, on_broken=reasons.append), peers, reasons


@pytest.mark.parametrize(
    ("asked", "over"),
    [
        (FormationId(generation=2, number=0), False),
        (FormationId(generation=2, number=1), True),
        (FormationId(generation=2, number=2), True),
        (FormationId(generation=3, number=1), False),
    ],
    ids=["its own", "the next", "one after", "another generation's"],
)
def test_a_peer_that_asks_about_the_next_vote_has_left_this_formation(asked: FormationId, over: bool) -> None:
    """Otherwise one waits for the other's arrival, and the other for the vote, without end."""
    state, peers, reasons = alone()
    membership: Any = SimpleNamespace(formation=FormationId(generation=2, number=0))
    state.membership = membership
    answer = asyncio.run(peers.handlers["status"]({"formation": asked}))
    assert answer == {"decided": None, "finished": False, "hopeless": False}
    assert bool(reasons) is over
    assert (FormationId(generation=2, number=0) in state.broken) is over


@pytest.mark.parametrize(
    ("theirs", "broken", "over"),
    [((2, 1), False, False), ((2, 1), True, True), ((2, 2), False, True), ((2, 0), True, False), ((3, 0), True, False)],
    ids=["is in ours", "gave ours up", "is in a later one", "was in an earlier one", "another generation"],
)
def test_replies_reveal_a_broken_formation(theirs: tuple[int, int], broken: bool, over: bool) -> None:
    """A peer that cannot call this rank reports in its replies that it gave up the formation."""
    state, peers, reasons = alone()
    peers.on_reply({"standing": list(theirs), "broken": broken})  # in no formation yet
    formation = FormationId(generation=2, number=1)
    state.membership = SimpleNamespace(formation=formation)  # type: ignore[assignment]  # all that is looked at
    assert peers.reply_fields() == {"standing": (2, 1), "broken": False}
    peers.on_reply({"standing": list(theirs), "broken": broken})
    peers.on_reply({"error": "another job"})
    assert bool(reasons) is over
    assert peers.reply_fields() == {"standing": (2, 1), "broken": over}
