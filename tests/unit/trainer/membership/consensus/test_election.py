"""Votes among members that cannot all call each other: run in one loop, with a table of failing calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from heterotrain.membership.consensus.election import Election
from heterotrain.membership.consensus.peer_state import PeerState
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import FormationId
from heterotrain.network.heartbeat import PeerKey, key_of
from heterotrain_core.contract.plan import Rank
from support.plans import plan_of

CannotCall = set[tuple[int, int]]
"""(a, b): a gets no answer when it calls b."""


class VotingGroup:
    """The members of one formation, which all vote."""

    def __init__(self, count: int, cannot_call: CannotCall, *, min_replicas: int = 1) -> None:
        self.cannot_call = cannot_call
        plan = plan_of([1] * count, min_replicas=min_replicas)
        self.ranks = plan.ranks
        formation = FormationId(generation=1, number=0)
        self.membership = FormationMembership(
            held=HeldPlan(plan=plan, text=""), formation=formation, plan_ranks=tuple(range(count))
        )
        self.peers = [self._peers(rank) for rank in range(count)]
        self.states = [PeerState(peers, on_broken=lambda _why: None) for peers in self.peers]

    def _peers(self, me: int) -> Any:
        """Return a member's stand-in for the peer service."""
        rank_of: dict[PeerKey, int] = {key_of(rank): rank.rank for rank in self.ranks}

        def lost(key: PeerKey) -> bool:
            return (me, rank_of[key]) in self.cannot_call

        async def ask_all(ranks: list[Rank], op: str, body: Mapping[str, Any], **_options: Any) -> dict[PeerKey, Any]:
            await asyncio.sleep(0)
            reached = [rank for rank in ranks if (me, rank.rank) not in self.cannot_call]
            return {key_of(rank): await self.peers[rank.rank].handlers[op](dict(body)) for rank in reached}

        async def pause(_timeout_s: float) -> None:
            await asyncio.sleep(0.001)

        heartbeats = SimpleNamespace(
            is_up=lambda key: not lost(key), is_lost=lost, is_undetermined=lambda _key: False, ping_all=pause
        )
        return SimpleNamespace(
            identity=SimpleNamespace(worker_uid=f"u{me}", local_rank=0), heartbeats=heartbeats, handlers={},
            notify=lambda: None,
            source=SimpleNamespace(newest=None), watch=lambda _members: None, ask_all=ask_all, wait_change=pause,
            timeout_s=0.01, loop=asyncio.get_running_loop(),
        )  # fmt: skip

    async def vote(self) -> list[tuple[int, ...] | None]:
        """Let all members vote at the same time; return the result of each."""
        votes = [
            Election(peers, state).vote(self.membership) for peers, state in zip(self.peers, self.states, strict=True)
        ]
        return await asyncio.gather(*votes)


def both(*pairs: tuple[int, int]) -> CannotCall:
    """Return a table in which neither member of each pair can call the other."""
    return {pair for one, other in pairs for pair in ((one, other), (other, one))}


@pytest.mark.parametrize(
    ("count", "cannot_call", "stay"),
    [
        (3, set(), (0, 1, 2)),
        (3, {(2, 0)}, (0, 1)),
        (3, {(0, 2)}, (0, 1)),
        (2, {(0, 1)}, (0,)),
        (2, {(1, 0)}, (0,)),
        (3, both((1, 2)), (0, 1)),
        (3, {(1, 0), (2, 0)}, (1, 2)),
        (4, {(1, 0), (2, 0), (3, 0)}, (1, 2, 3)),
        (4, {(0, 1), (0, 2), (0, 3)}, (1, 2, 3)),
        (5, both((0, 3), (3, 4)), (0, 1, 2, 4)),
    ],
    ids=["all reach all", "one cannot call", "the first cannot call", "of two", "of two, the other way", "two apart",
         "the first cannot be called", "three cannot call one", "one cannot call three", "one apart from two"],
)  # fmt: skip
def test_the_members_that_stay(count: int, cannot_call: CannotCall, stay: tuple[int, ...]) -> None:
    """All decide on the same set, in which all can call each other; members apart from most others stay out."""

    async def play() -> list[tuple[int, ...] | None]:
        async with asyncio.timeout(60):
            return await VotingGroup(count, cannot_call).vote()

    found = asyncio.run(play())
    assert set(found) == {stay}


def test_too_few_connected_members_wait_for_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    """They log it, and then follow the operator."""

    async def play() -> list[tuple[int, ...] | None]:
        group = VotingGroup(3, {(1, 2)}, min_replicas=3)

        async def name_others() -> None:
            message = "only ranks [0, 1] of the plan can all call each other: waiting for the operator's plan"
            while message not in caplog.text:  # noqa: ASYNC110  # a log has no event
                await asyncio.sleep(0.001)
            for peers in group.peers:
                peers.source.newest = SimpleNamespace(plan=SimpleNamespace(generation=2))

        async with asyncio.timeout(60):
            found, _ = await asyncio.gather(group.vote(), name_others())
        return found

    with caplog.at_level("INFO"):
        assert asyncio.run(play()) == [None, None, None]
