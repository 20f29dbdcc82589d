"""The state of one rank in the consensus: what it has promised, accepted and learned, and its answers to peers.

Votes, arrivals and the end of a formation are recorded here from two sources: this rank's own search for its next
formation (``rendezvous``, ``election``) and requests of peers. Everything runs in the peer service's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heterotrain.membership.consensus import paxos
from heterotrain.membership.consensus.paxos import Acceptor, Ballot
from heterotrain.membership.devices import DeviceIds
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.roster import FormationId
from heterotrain.network.heartbeat import PeerKey, key_of


class PeerState:
    """This rank's record of formations; those of older generations are dropped.

    Attributes:
        me: this rank.
        membership: the formation that this rank is in or tries to enter; ``None`` before its first.
        finished: this rank has committed everything.
        leave_at: deadline, on the loop's clock, until which a rank that has to leave still waits for a formation.
        acceptors: promises and votes.
        decided: results of votes, as ranks of the plan.
        arrived: on the host of a formation: the members that have arrived, with their devices.
        stores: (number, devices of all members by rank) of each formation whose host has announced its store.
        broken: formations that have been given up.
        no_quorum: this rank votes, but the members it can reach cannot decide or are too few: another rank has to
            propose.
    """

    def __init__(self, peers: PeerService, *, on_broken: Callable[[str], None]) -> None:
        """``on_broken`` is called with the reason when this rank's formation has been given up."""
        self.me: PeerKey = (peers.identity.worker_uid, peers.identity.local_rank)
        self.membership: FormationMembership | None = None
        self.finished = False
        self.leave_at: float | None = None
        self.acceptors: dict[FormationId, Acceptor] = {}
        self.decided: dict[FormationId, tuple[int, ...]] = {}
        self.arrived: dict[FormationId, dict[PeerKey, DeviceIds]] = {}
        self.stores: dict[FormationId, tuple[int, tuple[DeviceIds, ...]]] = {}
        self.broken: set[FormationId] = set()
        self.no_quorum = False
        self._peers = peers
        self._on_broken = on_broken
        peers.subscribe(on_lost=self._on_lost, on_reply=self._on_reply, reply_fields=self._reply_fields)
        peers.handlers |= {
            "prepare": self._on_prepare,
            "accept": self._on_accept,
            "decided": self._on_decided,
            "arrived": self._on_arrived,
            "store": self._on_store,
            "broken": self._on_broken_elsewhere,
            "status": self._on_status,
        }

    # -- questions ---------------------------------------------------------------------------------------------------

    def acceptor(self, formation: FormationId) -> Acceptor:
        """Return this rank's Paxos state in one vote."""
        return self.acceptors.get(formation, Acceptor())

    def has_stopped_waiting(self, membership: FormationMembership | None) -> bool:
        """Return whether this rank has to leave and no longer waits for a formation."""
        if self.leave_at is None:
            return False
        return membership is None or not membership.takes_part(self.me) or self._peers.loop.time() >= self.leave_at

    def is_superseded(self, membership: FormationMembership) -> bool:
        """Return whether the operator has started a newer generation."""
        held = self._peers.source.newest
        return held is not None and held.plan.generation > membership.plan.generation

    def lost(self, membership: FormationMembership) -> list[int]:
        """Return the members, as ranks of the plan, that this rank has given up and has not reached since."""
        return [rank for rank in membership.plan_ranks if self._peers.heartbeats.is_lost(membership.key(rank))]

    async def is_needed(self, membership: FormationMembership) -> bool:
        """Return whether a peer that still answers has not committed everything."""
        body = {"formation": membership.formation}
        replies = await self._peers.ask_all(membership.others(self.me), "status", body)
        return not all(reply.get("finished") for reply in replies.values())

    # -- changes -----------------------------------------------------------------------------------------------------

    def forget_before(self, generation: int) -> None:
        """Drop everything of older generations."""
        tables: tuple[dict[FormationId, Any], ...] = (self.acceptors, self.decided, self.arrived, self.stores)
        for table in tables:
            for formation in [key for key in table if key.generation < generation]:
                del table[formation]
        self.broken = {formation for formation in self.broken if formation.generation >= generation}

    def give_up(self, reason: str) -> None:
        """Give up the current formation and notify the other members, so that none of them waits for a time-out."""
        membership = self.membership
        if membership is None or membership.formation in self.broken:
            return
        self._mark_broken(reason)
        others = [peer for peer in membership.others(self.me) if self._peers.heartbeats.is_up(key_of(peer))]
        notice = self._peers.ask_all(others, "broken", {"formation": membership.formation})
        self._notice = self._peers.loop.create_task(notice)  # a task without a reference may be garbage-collected

    def _mark_broken(self, reason: str) -> None:
        if self.membership is not None and self.membership.formation not in self.broken:
            self.broken.add(self.membership.formation)
            self._on_broken(reason)
            self._peers.notify()

    def _broken_before(self, formation: FormationId) -> None:
        """Leave a formation whose successor is being voted on."""
        if self.membership is not None and self.membership.formation < formation:
            self._mark_broken(f"peers vote on formation {formation}")

    def _on_lost(self, key: PeerKey, reason: str) -> None:
        if self.membership is not None and self.membership.takes_part(key):
            self.give_up(f"peer {key[0]}/{key[1]} {reason}")

    # -- fields of every reply: a rank that gave up a formation may be unable to call some of its members --------------

    def _reply_fields(self) -> dict[str, Any]:
        if self.membership is None:
            return {}
        return {
            "standing": self.membership.formation,
            "broken": self.membership.formation in self.broken,
        }

    def _on_reply(self, answer: Mapping[str, Any]) -> None:
        if self.membership is None or "standing" not in answer:
            return
        theirs, own = FormationId(*answer["standing"]), self.membership.formation
        if theirs.generation == own.generation and (theirs > own or (theirs == own and answer.get("broken"))):
            self._mark_broken("a peer has given the formation up")

    # -- requests of peers -------------------------------------------------------------------------------------------

    async def _on_prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        formation = FormationId(*message["formation"])
        self._broken_before(formation)
        acceptor, promised = paxos.prepare(self.acceptor(formation), Ballot(*message["ballot"]))
        self.acceptors[formation] = acceptor
        membership = self.membership
        same_plan = membership is not None and membership.plan.generation == formation.generation
        return {
            "promised": promised,
            "leaving": self.leave_at is not None,
            "lost": self.lost(membership) if membership is not None and same_plan else [],  # as ranks of that plan
            "accepted": acceptor.accepted,
        }

    async def _on_accept(self, message: dict[str, Any]) -> dict[str, Any]:
        formation = FormationId(*message["formation"])
        acceptor, accepted = paxos.accept(self.acceptor(formation), Ballot(*message["ballot"]), tuple(message["ranks"]))
        self.acceptors[formation] = acceptor
        return {"accepted": accepted}

    async def _on_decided(self, message: dict[str, Any]) -> dict[str, Any]:
        formation = FormationId(*message["formation"])
        self.decided[formation] = tuple(message["ranks"])
        self._broken_before(formation)
        self._peers.notify()
        return {}

    async def _on_arrived(self, message: dict[str, Any]) -> dict[str, Any]:
        formation = FormationId(*message["formation"])
        key = (str(message["from"][0]), int(message["from"][1]))
        self.arrived.setdefault(formation, {})[key] = tuple(map(str, message["device"]))
        self._peers.notify()
        return {}

    async def _on_store(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take the store's number as the signal to connect; a positive answer is a promise to come."""
        formation = FormationId(*message["formation"])
        waiting = self.membership is not None and self.membership.formation == formation
        comes = waiting and formation not in self.broken
        if comes:
            number, devices = message["store"]
            self.stores[formation] = (int(number), tuple(tuple(map(str, ids)) for ids in devices))
            self._peers.notify()
        return {"comes": comes}

    async def _on_broken_elsewhere(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.membership is not None and self.membership.formation == FormationId(*message["formation"]):
            self._mark_broken("a peer found the formation broken")
        return {}

    async def _on_status(self, message: dict[str, Any]) -> dict[str, Any]:
        formation = FormationId(*message["formation"])
        if self.membership is not None and self.membership.formation.generation == formation.generation:
            # The caller has already left the previous formation but had no connection to say so.
            self._broken_before(formation)
        return {
            "decided": self.decided.get(formation),
            "finished": self.finished,
            "hopeless": self.no_quorum,
        }
