"""The survivors' vote on their next formation: ``ballot``'s Paxos, carried by the peer service.

The lowest rank that stays proposes; the others ask whether something has been decided. Who is up changes meanwhile, so
both are tried again until there is a result, the operator names a newer generation, or this rank has no more need of one.
"""

from __future__ import annotations

import logging
from typing import Any

from heterotrain.membership import ballot as paxos
from heterotrain.membership.ballot import Accepted, Ballot
from heterotrain.membership.ledger import Ledger
from heterotrain.membership.peers import PeerService
from heterotrain.membership.roster import FormationId, workers_of
from heterotrain.membership.standing import Standing, pack
from heterotrain.network.links import key_of

_log = logging.getLogger(__name__)

RETRY_S = 0.25


class Election:
    """Finds out who takes part in the formation after this one."""

    def __init__(self, peers: PeerService, ledger: Ledger) -> None:
        self._peers = peers
        self._ledger = ledger
        self._said = ""

    async def vote(self, standing: Standing) -> tuple[int, ...] | None:
        """Return the decided members of the next formation, or ``None`` when this rank stops to vote."""
        ledger, formation = self._ledger, standing.next_formation
        ledger.standing = standing
        self._peers.watch(standing.members)
        ledger.give_up("a member left or was lost")
        await self._peers.links.ping_all(RETRY_S)
        while formation not in ledger.decided:
            if ledger.is_outranked(standing) or ledger.gives_up(standing):
                return None
            if ledger.finished and not await ledger.is_needed(standing):
                return None
            up = [rank for rank in standing.plan_ranks if self._is_up(standing, rank)]
            staying = tuple(rank for rank in up if rank not in standing.leaving)
            # Everybody goes: a vote about nobody tells the leavers that they are agreed.
            leader = min(staying) if staying else min(up)
            enough = len(workers_of(standing.plan, staying)) >= standing.plan.min_replicas or not staying
            settled = not any(self._peers.links.is_undetermined(standing.key(r)) for r in standing.plan_ranks)
            possible = enough and paxos.is_majority(len(up), len(standing.plan_ranks))
            if settled and not possible and ledger.leave_at is not None:
                ledger.leave_at = self._peers.loop.time()  # those who stay wait for the operator: our vote is no use
                continue
            if settled and not possible:
                self._say(f"{len(up)} of {len(standing.plan_ranks)} members are left: waiting for the operator's plan")
            if settled and possible and standing.key(leader) == ledger.me:
                await self._propose(standing, formation, leader, staying)
            else:
                await self._learn(standing, formation, up)
            if formation not in ledger.decided:
                await self._peers.wait_change(RETRY_S)
        ranks = ledger.decided[formation]
        _log.info("formation %s: ranks %s of the plan take part", formation, list(ranks))
        return ranks

    async def _propose(self, standing: Standing, formation: FormationId, rank: int, wish: tuple[int, ...]) -> None:
        ledger, acceptors = self._ledger, standing.members
        seen = ledger.acceptor(formation).promised
        number = Ballot(number=seen.number + 1 if seen else 1, rank=rank)
        body: dict[str, Any] = {"formation": pack(formation), "ballot": [number.number, number.rank]}
        own, promised = paxos.prepare(ledger.acceptor(formation), number)
        ledger.acceptors[formation] = own
        if not promised:
            return
        others = [member for member in standing.others(ledger.me) if self._peers.links.is_up(key_of(member))]
        replies = await self._peers.ask_all(others, "prepare", body)
        promises = [reply for reply in replies.values() if reply.get("promised")]
        if not paxos.is_majority(1 + len(promises), len(acceptors)):
            return
        going = {key for key, reply in replies.items() if reply.get("leaving")}
        if ledger.leave_at is not None:
            going.add(ledger.me)
        wish = tuple(member for member in wish if standing.key(member) not in going)
        if wish and len(workers_of(standing.plan, wish)) < standing.plan.min_replicas:
            return
        ranks = paxos.value_to_propose(wish, [own.accepted, *(_accepted(p.get("accepted")) for p in promises)])
        own, voted = paxos.accept(ledger.acceptor(formation), number, ranks)
        ledger.acceptors[formation] = own
        if not voted:
            return
        replies = await self._peers.ask_all(others, "accept", body | {"ranks": list(ranks)})
        votes = 1 + sum(bool(reply.get("accepted")) for reply in replies.values())
        if paxos.is_majority(votes, len(acceptors)):
            ledger.decided[formation] = ranks
            await self._peers.ask_all(others, "decided", {"formation": pack(formation), "ranks": list(ranks)})

    async def _learn(self, standing: Standing, formation: FormationId, up: list[int]) -> None:
        others = [standing.plan.members[rank] for rank in up if standing.key(rank) != self._ledger.me]
        replies = await self._peers.ask_all(others, "status", {"formation": pack(formation)}, timeout_s=RETRY_S)
        for reply in replies.values():
            if reply.get("decided") is not None:
                self._ledger.decided[formation] = tuple(reply["decided"])

    def _is_up(self, standing: Standing, rank: int) -> bool:
        key = standing.key(rank)
        return key == self._ledger.me or self._peers.links.is_up(key)

    def _say(self, text: str) -> None:
        """Log a state of waiting, once until it changes."""
        if text != self._said:
            self._said = text
            _log.info("%s", text)


def _accepted(raw: Any) -> Accepted | None:
    return Accepted(ballot=Ballot(number=raw[0][0], rank=raw[0][1]), ranks=tuple(raw[1])) if raw else None
