"""Votes among members that cannot all call each other: run in one loop, with a table of failing calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import looptime
import pytest
from heterotrain.membership.consensus.election import Election
from heterotrain.membership.consensus.peer_state import PeerState
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import FormationId
from heterotrain.network.heartbeat import PeerKey, key_of
from heterotrain_core.contract.plan import Layout, LayoutKind, Rank
from support.plans import plan_of
from support.repeat import times

CannotCall = set[tuple[int, int]]
"""(a, b): a gets no answer when it calls b."""
_T = TypeVar("_T")


def run(play: Coroutine[Any, Any, _T]) -> _T:
    """Run votes by a clock that advances only while all of them wait: a busy machine ends no time limit early."""
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        return runner.run(play)


class VotingGroup:
    """The members of one formation, which all vote."""

    def __init__(
        self,
        layouts: int | Sequence[int],
        cannot_call: CannotCall,
        *,
        min_replicas: int = 1,
        dead: Collection[int] = (),
    ) -> None:
        """``layouts`` is a number of members of one rank, or the ranks of each member; dead ranks do not vote."""
        sizes = [1] * layouts if isinstance(layouts, int) else layouts
        shapes = [Layout(kind=LayoutKind.SHARDED, shards=size) for size in sizes]
        plan = self.plan = plan_of([1] * len(sizes), layouts=shapes, min_replicas=min_replicas)
        self.ranks, count = plan.ranks, len(plan.ranks)
        self.dead = dead
        self.cannot_call = cannot_call | {(one, other) for one in range(count) for other in dead if one != other}
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
            notify=lambda: None, subscribe=lambda **_told: None,
            source=SimpleNamespace(newest=None), watch=lambda _members: None, ask_all=ask_all, wait_change=pause,
            timeout_s=0.01, loop=asyncio.get_running_loop(),
        )  # fmt: skip

    async def vote(self) -> list[tuple[int, ...] | None]:
        """Let all members vote at the same time; return the result of each."""
        votes = [
            Election(self.peers[rank], self.states[rank]).vote(self.membership)
            for rank in range(len(self.ranks))
            if rank not in self.dead
        ]
        return await asyncio.gather(*votes)

    async def vote_until_the_operator_decides(self, after_s: float) -> list[tuple[int, ...] | None]:
        """As ``vote``, but a newer generation ends votes that take longer."""

        async def decide() -> None:
            await asyncio.sleep(after_s)
            for peers in self.peers:
                peers.source.newest = SimpleNamespace(plan=SimpleNamespace(generation=2))

        operator = asyncio.create_task(decide())
        found = await self.vote()
        operator.cancel()
        return found


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

    found = run(play())
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
        assert run(play()) == [None, None, None]


@pytest.mark.parametrize(
    ("sizes", "dead", "cannot_call", "stay"),
    [
        ((2, 2), (1,), set(), (2, 3)),
        ((2, 2), (0,), set(), (2, 3)),
        ((2, 2, 2), (1, 4), set(), (2, 3)),
        ((3, 1, 1), (2,), set(), (3, 4)),
        ((1, 4), (0,), set(), (1, 2, 3, 4)),
        ((2, 2), (), both((0, 1)), (2, 3)),
        ((2, 2), (), both((1, 2)), (0, 1)),
        ((2, 1, 1), (), both((0, 2), (0, 3)), (2, 3)),
    ],
    ids=["one of two pipelines", "its first rank", "two of three", "the large one", "the small one", "apart inside",
         "apart from the other", "apart from both others"],
)  # fmt: skip
def test_whole_members_stay_and_the_ranks_of_a_broken_one_vote(
    sizes: tuple[int, ...], dead: tuple[int, ...], cannot_call: CannotCall, stay: tuple[int, ...]
) -> None:
    """Of two members with two ranks, three ranks are left: without the third vote there would be no majority."""

    async def play() -> list[tuple[int, ...] | None]:
        async with asyncio.timeout(60):
            return await VotingGroup(sizes, cannot_call, dead=dead).vote()

    assert set(run(play())) == {stay}


@pytest.mark.parametrize(
    ("sizes", "dead", "min_replicas", "why"),
    [
        ((3,), (1,), 1, "2 of 3 ranks are left, 0 of them in whole members"),
        ((2, 2), (1, 2), 1, "2 of 4 ranks are left, 0 of them in whole members"),
        ((2, 2), (2, 3), 1, "2 of 4 ranks are left: waiting"),
        ((4, 1, 1), (0, 1, 2, 3), 1, "2 of 6 ranks are left: waiting"),
        ((2, 2), (3,), 2, "3 of 4 ranks are left, 2 of them in whole members"),
    ],
    ids=["the only member", "both are broken", "a whole member is half of the ranks", "the large one", "minReplicas"],
)
def test_without_a_majority_or_a_whole_member_all_wait_for_the_operator(
    sizes: tuple[int, ...], dead: tuple[int, ...], min_replicas: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No set is decided, not even an empty one: a rank that was only cut off may return and make its member whole."""

    async def play() -> list[tuple[int, ...] | None]:
        async with asyncio.timeout(60):
            group = VotingGroup(sizes, set(), dead=dead, min_replicas=min_replicas)
            found = await group.vote_until_the_operator_decides(0.05)
            assert all(not state.decided for state in group.states)
            return found

    with caplog.at_level("INFO"):
        assert set(run(play())) == {None}
    assert why in caplog.text


@pytest.mark.parametrize(
    ("sizes", "leaving", "stay"),
    [((2, 2), (1,), (2, 3)), ((2, 2), (0, 1), (2, 3)), ((2, 1), (0, 1, 2), ())],
    ids=["a rank", "a member", "all"],
)
def test_a_member_with_a_leaving_rank_is_broken(
    sizes: tuple[int, ...], leaving: tuple[int, ...], stay: tuple[int, ...]
) -> None:
    """The leaving rank votes before it goes, and so does the rest of its member, which stays as spares."""

    async def play() -> list[tuple[int, ...] | None]:
        async with asyncio.timeout(60):
            group = VotingGroup(sizes, set())
            for rank in leaving:
                group.states[rank].leave_at = asyncio.get_running_loop().time() + 60
            return await group.vote()

    assert set(run(play())) == {stay}


def test_the_last_whole_member_that_breaks_by_a_leave_is_not_decided_upon() -> None:
    """The rest of a member whose only peer leaves is nobody who could train; the operator makes the next member."""

    async def play() -> list[tuple[int, ...] | None]:
        async with asyncio.timeout(60):
            group = VotingGroup((2,), set())
            group.states[1].leave_at = asyncio.get_running_loop().time() + 60
            return await group.vote_until_the_operator_decides(0.05)

    assert set(run(play())) == {None}


@pytest.mark.parametrize("seed", range(times(gate=20, every=600)))
def test_whatever_breaks_at_most_one_set_of_whole_members_goes_on(seed: int) -> None:
    """Random members, dead ranks and cuts: into two halves that cannot call each other, or of single directions."""
    rng = random.Random(seed)  # noqa: S311  # reproducible
    sizes = [rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(1, 4))]
    ranks = range(sum(sizes))
    dead = [rank for rank in ranks if rng.random() < 0.2]
    side = {rank: rng.random() < 0.3 for rank in ranks}
    cut = {(a, b) for a in ranks for b in ranks if a != b and seed % 2 and side[a] != side[b]}
    cut |= {(a, b) for a in ranks for b in ranks if a != b and rng.random() < 0.05}

    async def play() -> tuple[VotingGroup, list[tuple[int, ...] | None]]:
        async with asyncio.timeout(60):
            group = VotingGroup(sizes, cut, dead=dead)
            return group, await group.vote_until_the_operator_decides(0.2)

    group, found = run(play())
    decided = {ranks for state in group.states for ranks in state.decided.values()} | {*found} - {None}
    assert len(decided) <= 1
    for ranks_ in decided:
        assert ranks_
        assert group.plan.ranks_of_whole_members(ranks_) == ranks_
        assert not [pair for pair in group.cannot_call if set(pair) <= set(ranks_)]
