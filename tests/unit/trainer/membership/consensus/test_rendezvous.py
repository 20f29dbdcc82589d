"""A formation is given up when a member is lost before it has arrived, whichever rank detects that and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from heterotrain.membership.consensus.rendezvous import Rendezvous
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import FormationId
from heterotrain.network.heartbeat import PeerKey
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
        handlers={}, notify=lambda: None, watch=lambda _members: None,
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

    async def enter() -> Any:
        peers = peers_of((f"u{me}", 0), lost={("u2", 0)})
        rendezvous = Rendezvous(
            peers, device=(), host_store=lambda: pytest.fail("not all members have arrived"), on_broken=reasons.append
        )
        async with asyncio.timeout(0.5 if not given_up else 60):
            return await rendezvous._enter(membership)

    if given_up:
        assert asyncio.run(enter()) is None
        assert reasons == ["a member was lost before it had arrived"]
    else:
        with pytest.raises(TimeoutError):
            asyncio.run(enter())
        assert reasons == []
