"""A formation is given up when a member is lost before it has arrived, whichever rank detects that and when."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from heterotrain.errors import Excluded
from heterotrain.membership.consensus.rendezvous import Rendezvous
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import FormationId
from heterotrain.network.heartbeat import PeerKey
from heterotrain_core.contract.plan import Layout, LayoutKind, Plan
from support.plans import plan_of


def peers_of(me: PeerKey, *, lost: set[PeerKey]) -> Any:
    """Return a peer service whose peers never answer; some of them are lost."""

    async def no_reply(*_arguments: Any, **_options: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {}

    return SimpleNamespace(
        identity=SimpleNamespace(worker_uid=me[0], local_rank=me[1], name=me[0]),
        heartbeats=SimpleNamespace(is_lost=lost.__contains__, is_up=lambda _key: False, forget_losses=lost.clear),
        loop=SimpleNamespace(create_task=lambda work: asyncio.get_running_loop().create_task(work)),
        source=SimpleNamespace(newest=None),
        handlers={}, notify=lambda: None, subscribe=lambda **_told: None, watch=lambda _members: None,
        request=no_reply, ask_all=no_reply, wait_change=no_reply,
    )  # fmt: skip


@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize(("number", "given_up"), [(1, True), (0, False)])
def test_a_member_lost_during_the_vote_is_not_waited_for(me: int, number: int, given_up: bool) -> None:
    """On the host and on other ranks. A member lost before gets another chance when the operator names it again."""
    plan = plan_of([1, 1, 1], generation=4)
    formation = FormationId(generation=4, number=number)
    membership = FormationMembership(held=HeldPlan(plan=plan, text=""), formation=formation, plan_ranks=(0, 1, 2))
    reasons: list[str] = []
    waits = itertools.count()

    async def wait_change(_timeout_s: float) -> None:
        if next(waits) == 50:
            raise TimeoutError

    async def enter() -> Any:
        peers = peers_of((f"u{me}", 0), lost={("u2", 0)})
        peers.wait_change = wait_change
        rendezvous = Rendezvous(
            peers, device=(), host_store=lambda: pytest.fail("not all members have arrived"), on_broken=reasons.append
        )
        return await rendezvous._enter(membership)

    if given_up:
        assert asyncio.run(enter()) is None
        assert reasons == ["a member was lost before it had arrived"]
    else:
        with pytest.raises(TimeoutError):
            asyncio.run(enter())
        assert reasons == []


class Waiting:
    """A rank whose formation ``4.1`` has been decided without it; the clock moves with each wait."""

    def __init__(self, shards: int, *, me: int = 0) -> None:
        self.lost: set[PeerKey] = set()
        self.now_s = 0.0
        self.spare: list[str] = []
        layouts = [Layout(kind=LayoutKind.SHARDED, shards=shards), Layout()]
        self.plan = plan_of([1, 1], layouts=layouts, generation=4)
        formation = FormationId(generation=4, number=1)
        held = HeldPlan(plan=self.plan, text="")
        self.membership = FormationMembership(held=held, formation=formation, plan_ranks=(shards,))
        self.peers = peers_of((f"u{me}", 0), lost=self.lost)
        self.peers.identity.worker = f"w{me}"
        self.peers.loop = SimpleNamespace(time=lambda: self.now_s)
        self.peers.wait_change = self.wait_change
        self.rendezvous = Rendezvous(
            self.peers, device=(), host_store=lambda: pytest.fail("it takes part in nothing"), on_broken=str,
            on_spare=self.spare.append,
        )  # fmt: skip

    async def wait_change(self, _timeout_s: float) -> None:
        """Let a second pass; stop after two minutes."""
        self.now_s += 1.0
        if self.now_s > 120:
            raise TimeoutError

    def name(self, plan: Plan) -> None:
        """Deliver a newer plan."""
        self.peers.source.newest = HeldPlan(plan=plan, text="")

    def outcome(self) -> str:
        """Return how the search for the next formation ends."""
        try:
            asyncio.run(self.rendezvous._next_formation(self.membership, patience_s=10.0))
        except (TimeoutError, Excluded) as error:
            return type(error).__name__
        return "left"


def test_a_rank_whose_member_lost_another_waits_as_a_spare_without_a_limit() -> None:
    """It does not end, although no plan names it for long, and says why."""
    waiting = Waiting(shards=2)
    waiting.lost.add(("u1", 0))
    assert waiting.outcome() == "TimeoutError"
    assert waiting.spare == ["its member lost w1/0"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_member_that_was_left_out_with_all_its_ranks_ends(shards: int) -> None:
    """Its pods come back as new ones; the operator would not notice otherwise."""
    waiting = Waiting(shards=shards)
    assert waiting.outcome() == "Excluded"
    assert waiting.now_s < 20
    assert waiting.spare == []


def test_a_loss_that_shows_late_still_makes_a_spare() -> None:
    waiting = Waiting(shards=2)
    earlier = waiting.peers.wait_change

    async def lose(timeout_s: float) -> None:
        await earlier(timeout_s)
        if waiting.now_s == 5:
            waiting.lost.add(("u1", 0))

    waiting.peers.wait_change = lose
    assert waiting.outcome() == "TimeoutError"


def test_a_plan_decides_whether_a_rank_that_it_does_not_name_is_a_spare() -> None:
    """A plan without the worker ends the wait of a spare, unless it lists the worker as a spare."""
    newer = plan_of([1], generation=5)
    newer = replace(newer, ranks=tuple(replace(rank, worker="w9", worker_uid="u9") for rank in newer.ranks))
    for spares, outcome in (((), "Excluded"), (("w0",), "TimeoutError"), (("w5",), "Excluded")):
        waiting = Waiting(shards=2)
        waiting.lost.add(("u1", 0))
        waiting.name(replace(newer, spares=spares))
        assert waiting.outcome() == outcome
        assert waiting.spare == (["plan 5.0 has no member for it"] if spares == ("w0",) else [])


def test_a_new_worker_that_a_plan_lists_as_a_spare_waits_like_any_new_worker() -> None:
    waiting = Waiting(shards=2)
    waiting.membership = None  # type: ignore[assignment]  # in no formation yet
    waiting.name(replace(waiting.plan, spares=("w7",)))
    waiting.peers.identity.worker, waiting.peers.identity.worker_uid = "w7", "u7"
    waiting.rendezvous._state.me = ("u7", 0)
    assert waiting.outcome() == "TimeoutError"
    assert waiting.spare == ["plan 4.0 has no member for it"]


def test_a_spare_that_is_asked_to_leave_leaves() -> None:
    waiting = Waiting(shards=2)
    waiting.lost.add(("u1", 0))
    waiting.rendezvous._state.leave_at = 60.0
    assert waiting.outcome() == "left"
