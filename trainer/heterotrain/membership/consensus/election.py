"""The survivors' vote on their next formation: ``ballot``'s Paxos, carried by the peer service.

The lowest rank that stays proposes, unless it says that those whom it reaches cannot decide; the others ask whether something has
been decided. Who is up changes meanwhile, so both are tried again until there is a result, the operator names a newer generation,
or this rank has no more need of one.

Everybody says whom it cannot call. Where a connection works one way only, or two members cannot call each other though others reach
both, one of the two stays out, or the next formation would break as the last one did.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from heterotrain.membership.consensus import paxos
from heterotrain.membership.consensus.paxos import Accepted, Ballot
from heterotrain.membership.consensus.peer_state import Ledger
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.roster import FormationId, workers_of
from heterotrain.membership.standing import Standing, pack
from heterotrain.network.heartbeat import PeerKey, key_of

_log = logging.getLogger(__name__)

RETRY_S = 0.25


class Election:
    """Finds out who takes part in the formation after this one."""

    def __init__(self, peers: PeerService, ledger: Ledger) -> None:
        self._peers = peers
        self._ledger = ledger
        self._said = ""
        self._hopeless: set[PeerKey] = set()
        self._apart_since: dict[tuple[int, int], float] = {}

    async def vote(self, standing: Standing) -> tuple[int, ...] | None:
        """Return the decided members of the next formation, or ``None`` when this rank stops to vote."""
        ledger, formation = self._ledger, standing.next_formation
        ledger.standing = standing
        self._peers.watch(standing.members)
        ledger.give_up("a member left or was lost")
        ledger.hopeless = False
        self._hopeless.clear()
        self._apart_since.clear()
        await self._peers.links.ping_all(RETRY_S)
        while formation not in ledger.decided:
            if ledger.is_outranked(standing) or ledger.gives_up(standing):
                return None
            if ledger.finished and not await ledger.is_needed(standing):
                return None
            up = [rank for rank in standing.plan_ranks if self._is_up(standing, rank)]
            staying = tuple(rank for rank in up if rank not in standing.leaving)
            # Everybody goes: a vote about nobody tells the leavers that they are agreed.
            leader = min([r for r in staying or up if standing.key(r) not in self._hopeless] or staying or up)
            enough = len(workers_of(standing.plan, staying)) >= standing.plan.min_replicas or not staying
            settled = not any(self._peers.links.is_undetermined(standing.key(r)) for r in standing.plan_ranks)
            possible = enough and paxos.is_majority(len(up), len(standing.plan_ranks))
            ledger.hopeless = settled and not possible
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
        views = {rank: replies.get(standing.key(rank), {}).get("lost", ()) for rank in wish}
        apart = {(one, other) for one, lost in views.items() for other in lost if other in wish}
        workers = {member: standing.plan.members[member].worker for member in standing.plan_ranks}
        known = paxos.acquainted(wish, self._long(apart), workers=workers)
        if any({*pair} <= {*known} for pair in apart):
            return  # perhaps a mishap: whoever was frozen or cut off is back for us, and not yet for all others
        if wish and len(workers_of(standing.plan, known)) < standing.plan.min_replicas:
            self._say(f"only ranks {list(known)} of the plan can all call each other: waiting for the operator's plan")
            return
        if known != wish:
            _log.warning(
                "ranks %s of the plan stay out: they and others cannot call each other", sorted({*wish} - {*known})
            )
        wish = known
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
        self._hopeless = {key for key, reply in replies.items() if reply.get("hopeless")}

    def _long(self, apart: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return the pairs that have been apart for longer than a host may be silent, ever since this rank reaches both."""
        now = self._peers.loop.time()
        self._apart_since = {pair: self._apart_since.get(pair, now) for pair in apart}
        return {pair for pair, since in self._apart_since.items() if now - since >= self._peers.timeout_s}

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
