"""The survivors' vote on their next formation: the Paxos of ``paxos``, carried by the peer service.

The lowest rank that does not leave proposes, unless it reports that the members it can reach cannot decide. The other
ranks ask whether something has been decided. Ranks come and go meanwhile, so both are repeated until there is a result,
the operator names a newer generation, or this rank no longer needs a result.

The next formation consists of whole members. A member that lost a rank is broken: its other ranks vote, as the leaving
ones do, and then wait as spares for the operator's next plan.

Every member reports which others it cannot call. Where a connection works in one direction only, or two members cannot
call each other although others reach both, one of the two stays out. Otherwise the next formation would break as the
last one did.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from heterotrain.membership.consensus import paxos
from heterotrain.membership.consensus.paxos import Accepted, Ballot
from heterotrain.membership.consensus.peer_state import PeerState
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.roster import FormationId
from heterotrain.network.heartbeat import PeerKey, key_of

_log = logging.getLogger(__name__)

RETRY_S = 0.25


class Election:
    """Determines the members of the formation after this one."""

    def __init__(self, peers: PeerService, state: PeerState) -> None:
        self._peers = peers
        self._state = state
        self._last_logged = ""
        self._no_quorum: set[PeerKey] = set()
        self._apart_since: dict[tuple[int, int], float] = {}

    async def vote(self, membership: FormationMembership) -> tuple[int, ...] | None:
        """Return the decided members of the next formation, or ``None`` when this rank stops voting."""
        state, formation = self._state, membership.next_formation
        state.membership = membership
        self._peers.watch(membership.ranks)
        state.give_up("a member left or was lost")
        state.no_quorum = False
        self._no_quorum.clear()
        self._apart_since.clear()
        await self._peers.heartbeats.ping_all(RETRY_S)
        up = list(membership.plan_ranks)
        while formation not in state.decided:
            if state.is_superseded(membership) or state.has_stopped_waiting(membership):
                return None
            if state.finished and not await state.is_needed(membership):
                return None
            up = [rank for rank in membership.plan_ranks if self._is_up(membership, rank)]
            rest = tuple(rank for rank in up if rank not in membership.leaving)
            staying = membership.plan.ranks_of_whole_members(rest)
            # All ranks leave: a vote on the empty set confirms to the leaving ranks that all agree.
            # The leader need not stay itself: which members are whole, each rank sees by its own connections.
            leader = min([r for r in rest or up if membership.key(r) not in self._no_quorum] or rest or up)
            enough = _are_enough(membership, staying) or not rest
            settled = not any(self._peers.heartbeats.is_undetermined(membership.key(r)) for r in membership.plan_ranks)
            possible = enough and paxos.is_majority(len(up), len(membership.plan_ranks))
            state.no_quorum = settled and not possible
            if settled and not possible and state.leave_at is not None:
                # The staying ranks wait for the operator: the vote of this rank would not help them.
                state.leave_at = self._peers.loop.time()
                continue
            if settled and not possible:
                whole = f", {len(staying)} of them in whole members" if len(staying) < len(rest) else ""
                self._log_once(
                    f"{len(up)} of {len(membership.plan_ranks)} ranks are left{whole}: waiting for the operator's plan"
                )
            if settled and possible and membership.key(leader) == state.me:
                await self._propose(membership, formation, leader, rest)
            else:
                await self._ask_for_decision(membership, formation, up)
            if formation not in state.decided:
                await self._peers.wait_change(RETRY_S)
        ranks = state.decided[formation]
        left = [rank for rank in up if rank not in membership.leaving]
        spares = sorted({*left} - {*ranks} - {*membership.plan.ranks_of_whole_members(left)})
        note = f"; ranks {spares} of broken members wait as spares" if spares else ""
        _log.info("formation %s: ranks %s of the plan take part%s", formation, list(ranks), note)
        return ranks

    async def _propose(
        self, membership: FormationMembership, formation: FormationId, rank: int, rest: tuple[int, ...]
    ) -> None:
        state, acceptors = self._state, membership.plan_ranks
        highest = state.acceptor(formation).promised
        number = Ballot(number=highest.number + 1 if highest else 1, rank=rank)
        body: dict[str, Any] = {"formation": formation, "ballot": number}
        own, promised = paxos.prepare(state.acceptor(formation), number)
        state.acceptors[formation] = own
        if not promised:
            return
        others = [peer for peer in membership.others(state.me) if self._peers.heartbeats.is_up(key_of(peer))]
        replies = await self._peers.ask_all(others, "prepare", body)
        promises = [reply for reply in replies.values() if reply.get("promised")]
        if not paxos.is_majority(1 + len(promises), len(acceptors)):
            return
        leaving = {key for key, reply in replies.items() if reply.get("leaving")}
        if state.leave_at is not None:
            leaving.add(state.me)
        rest = tuple(each for each in rest if membership.key(each) not in leaving)
        wanted = membership.plan.ranks_of_whole_members(rest)
        if rest and not wanted:
            return  # no whole member is left, although some ranks stay: the operator decides
        views = {rank: replies.get(membership.key(rank), {}).get("lost", ()) for rank in wanted}
        apart = {(one, other) for one, lost in views.items() for other in lost if other in wanted}
        workers = {each: membership.plan.ranks[each].worker for each in membership.plan_ranks}
        connected = paxos.fully_connected(
            wanted, self._apart_too_long(apart), workers=workers, whole=membership.plan.ranks_of_whole_members
        )
        if any({*pair} <= {*connected} for pair in apart):
            # Perhaps temporary: a rank that was frozen or cut off may be reachable from here before it is from others.
            return
        if wanted and not _are_enough(membership, connected):
            self._log_once(
                f"only ranks {list(connected)} of the plan can all call each other: waiting for the operator's plan"
            )
            return
        if connected != wanted:
            _log.warning(
                "ranks %s of the plan stay out: they and others cannot call each other",
                sorted({*wanted} - {*connected}),
            )
        wanted = connected
        accepted = (raw for promise in promises if (raw := promise.get("accepted")))
        theirs = (Accepted(Ballot(*ballot), tuple(voted)) for ballot, voted in accepted)
        ranks = paxos.value_to_propose(wanted, [own.accepted, *theirs])
        own, voted = paxos.accept(state.acceptor(formation), number, ranks)
        state.acceptors[formation] = own
        if not voted:
            return
        replies = await self._peers.ask_all(others, "accept", body | {"ranks": list(ranks)})
        votes = 1 + sum(bool(reply.get("accepted")) for reply in replies.values())
        if paxos.is_majority(votes, len(acceptors)):
            state.decided[formation] = ranks
            await self._peers.ask_all(others, "decided", {"formation": formation, "ranks": list(ranks)})

    async def _ask_for_decision(self, membership: FormationMembership, formation: FormationId, up: list[int]) -> None:
        others = [membership.plan.ranks[rank] for rank in up if membership.key(rank) != self._state.me]
        replies = await self._peers.ask_all(others, "status", {"formation": formation}, timeout_s=RETRY_S)
        for reply in replies.values():
            if reply.get("decided") is not None:
                self._state.decided[formation] = tuple(reply["decided"])
        self._no_quorum = {key for key, reply in replies.items() if reply.get("hopeless")}

    def _apart_too_long(self, apart: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return the pairs that have been apart for longer than a host may be silent.

        Time counts from when this rank first reached both and one of them could not call the other.
        """
        now = self._peers.loop.time()
        self._apart_since = {pair: self._apart_since.get(pair, now) for pair in apart}
        return {pair for pair, since in self._apart_since.items() if now - since >= self._peers.timeout_s}

    def _is_up(self, membership: FormationMembership, rank: int) -> bool:
        key = membership.key(rank)
        return key == self._state.me or self._peers.heartbeats.is_up(key)

    def _log_once(self, text: str) -> None:
        """Log why the vote waits; an unchanged reason is not logged again."""
        if text != self._last_logged:
            self._last_logged = text
            _log.info("%s", text)


def _are_enough(membership: FormationMembership, ranks: tuple[int, ...]) -> bool:
    """Return whether ranks of whole members may go on: at least one member, and as many replicas as the job needs."""
    return len(ranks) > 0 and membership.plan.replicas(ranks) >= membership.plan.min_replicas
