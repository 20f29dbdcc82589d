"""A member learns that its formation is over from whoever speaks of the next one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from heterotrain.membership.consensus.peer_state import Ledger
from heterotrain.membership.roster import FormationId
from heterotrain.membership.standing import pack


def alone() -> tuple[Ledger, Any, list[str]]:
    """Return the ledger of a rank without a network, its peers, and what it says when its formation is given up."""
    told: list[str] = []
    peers: Any = SimpleNamespace(
        identity=SimpleNamespace(worker_uid="u0", local_rank=0),
        links=SimpleNamespace(),
        handlers={},
        nudge=lambda: None,
    )
    return Ledger(peers, on_broken=told.append), peers, told


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
def test_who_asks_for_the_result_of_the_next_vote_has_left_this_formation(asked: FormationId, over: bool) -> None:
    """Otherwise one waits for the other's arrival, and that one for the vote, for as long as both live."""
    ledger, peers, told = alone()
    standing: Any = SimpleNamespace(formation=FormationId(generation=2, number=0))
    ledger.standing = standing
    answer = asyncio.run(peers.handlers["status"]({"formation": pack(asked)}))
    assert answer == {"decided": None, "finished": False, "hopeless": False}
    assert bool(told) is over
    assert (FormationId(generation=2, number=0) in ledger.broken) is over


@pytest.mark.parametrize(
    ("theirs", "broken", "over"),
    [((2, 1), False, False), ((2, 1), True, True), ((2, 2), False, True), ((2, 0), True, False), ((3, 0), True, False)],
    ids=["is in ours", "gave ours up", "is in a later one", "was in an earlier one", "another generation"],
)
def test_what_answers_say_of_the_formation(theirs: tuple[int, int], broken: bool, over: bool) -> None:
    """A peer that cannot call this rank tells it so in its answers, or its formation would be waited for without end."""
    ledger, peers, told = alone()
    peers.hears({"standing": list(theirs), "broken": broken})  # in no formation yet
    formation = FormationId(generation=2, number=1)
    ledger.standing = SimpleNamespace(formation=formation)  # type: ignore[assignment]  # all that is looked at
    assert peers.tells() == {"standing": [2, 1], "broken": False}
    peers.hears({"standing": list(theirs), "broken": broken})
    peers.hears({"error": "another job"})
    assert bool(told) is over
    assert peers.tells() == {"standing": [2, 1], "broken": over}
