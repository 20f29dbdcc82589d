"""How a formation comes about: who takes part (the plan, or a vote of the survivors), and then everybody's arrival.

A new generation needs no vote: the plan names its members. When members of ``g.k`` are lost or leave, those who are left
vote on ``g.(k+1)`` (``ballot``). Either way the lowest rank that takes part waits until all others have arrived, starts
a fresh store and tells them where it is: a store that outlives its formation hands stale addresses to the next one.

Everything here runs in the peer service's loop; the training thread waits for the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from heterotrain_core.contract.plan import Member, Plan

from heterotrain import ballot as paxos
from heterotrain.ballot import Accepted, Acceptor, Ballot
from heterotrain.errors import Excluded
from heterotrain.peers import PeerKey, PeerService, key_of
from heterotrain.plan_source import Held
from heterotrain.rendezvous import HostedStore
from heterotrain.roster import FormationId, workers_of

_log = logging.getLogger(__name__)

RETRY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank is when it begins to look for its next formation.

    Attributes:
        held: a plan of the generation it was in.
        formation: the formation it was in or tried to enter.
        plan_ranks: the members of that formation.
        leaving: those among them who announced that they go.
    """

    held: Held
    formation: FormationId
    plan_ranks: tuple[int, ...]
    leaving: frozenset[int] = frozenset()

    @property
    def plan(self) -> Plan:
        """The plan that names the members."""
        return self.held.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A formation that everybody has arrived at, and where its store is."""

    standing: Standing
    store_address: str
    store_port: int
    all_cuda: bool
    """Whether every member has an accelerator that NCCL can use."""
    hosted: HostedStore | None = None
    """The store itself, on the rank that hosts it."""


@dataclass(slots=True)
class Book:
    """What this rank promised, learned and heard, by formation; old formations are forgotten with their generation."""

    acceptors: dict[FormationId, Acceptor] = field(default_factory=dict)
    decided: dict[FormationId, tuple[int, ...]] = field(default_factory=dict)
    arrived: dict[FormationId, dict[PeerKey, bool]] = field(default_factory=dict)
    stores: dict[FormationId, tuple[int, bool]] = field(default_factory=dict)
    broken: set[FormationId] = field(default_factory=set)

    def forget_before(self, generation: int) -> None:
        """Drop everything of older generations."""
        tables: tuple[dict[FormationId, Any], ...] = (self.acceptors, self.decided, self.arrived, self.stores)
        for table in tables:
            for formation in [key for key in table if key.generation < generation]:
                del table[formation]
        self.broken = {formation for formation in self.broken if formation.generation >= generation}


class Assembly:
    """Finds the next formation together with the peers."""

    def __init__(
        self,
        peers: PeerService,
        *,
        has_cuda: bool,
        host_store: Callable[[], HostedStore],
        on_broken: Callable[[str], None],
    ) -> None:
        self._peers = peers
        self._has_cuda = has_cuda
        self._me: PeerKey = (peers.identity.worker_uid, peers.identity.local_rank)
        self._host_store = host_store
        self._on_broken = on_broken
        self._book = Book()
        self._standing: Standing | None = None
        self._finished = False
        self._leave_at: float | None = None
        self._said = ""
        peers.on_lost = self._on_lost
        peers.handlers |= {
            "prepare": self._on_prepare,
            "accept": self._on_accept,
            "decided": self._on_decided,
            "arrived": self._on_arrived,
            "store": self._on_store,
            "broken": self._on_broken_elsewhere,
            "status": self._on_status,
        }

    # -- from the training thread ------------------------------------------------------------------------------------

    def next_formation(self, standing: Standing | None, *, patience_s: float) -> Entry | None:
        """Return the next formation that this rank takes part in; ``None`` when it left, or nobody needs it any more.

        Args:
            standing: the formation that ended, or ``None`` for a process that was in none yet.
            patience_s: how long an excluded rank waits for a plan that names it.

        Raises:
            Excluded: the others went on without this rank.
        """
        return self._peers.call(self._next_formation(standing, patience_s=patience_s)).result()

    def leave_soon(self, within_s: float) -> None:
        """Note that this rank was told to go: it waits no longer than ``within_s`` for a formation. Safe in a signal."""
        if self._leave_at is None:
            self._leave_at = self._peers.loop.time() + within_s
            self._peers.nudge()

    def is_broken(self, formation: FormationId) -> bool:
        """Return whether the formation has been given up."""
        return formation in self._book.broken

    def finish(self) -> None:
        """Say from now on that this rank has committed everything."""
        self._finished = True

    # -- the way to a formation --------------------------------------------------------------------------------------

    async def _next_formation(self, standing: Standing | None, *, patience_s: float) -> Entry | None:
        deadline = self._peers.loop.time() + patience_s
        while not await self._may_go(standing):
            newer = self._newer_standing(standing)
            if newer is not None:
                standing = newer
                entry = await self._enter(standing) if self._takes_part(standing) else None
                if entry is not None:
                    return entry
                continue
            if standing is None or not self._takes_part(standing):
                if standing is not None and self._peers.loop.time() > deadline:
                    raise Excluded(f"the others went on without {self._peers.identity.name} and no plan names it")
                await self._peers.wait_change(RETRY_S)
                continue
            ranks = await self._vote(standing)
            if ranks is None:
                continue
            following = FormationId(generation=standing.formation.generation, number=standing.formation.number + 1)
            standing = replace(standing, formation=following, plan_ranks=ranks)
            if self._takes_part(standing) and not self._leaves(standing):
                entry = await self._enter(replace(standing, leaving=frozenset()))
                if entry is not None:
                    return entry
            deadline = self._peers.loop.time() + patience_s
        return None

    async def _may_go(self, standing: Standing | None) -> bool:
        """Return whether this rank needs no formation any more: it leaves, or everything is done."""
        if self._gives_up(standing):
            return True
        if standing is None:
            return False
        if self._leaves(standing) and not self._takes_part(standing):
            return True
        return self._finished and not await self._is_needed(standing)

    def _newer_standing(self, standing: Standing | None) -> Standing | None:
        """Return where a newer generation puts this rank: into it, or out of its formation; ``None`` for no change."""
        held = self._peers.source.newest
        if held is None or held.plan.generation <= (standing.plan.generation if standing else 0):
            return None
        self._book.forget_before(held.plan.generation)
        if any(key_of(m) == self._me for m in held.plan.members):
            return _whole(held)
        if standing is not None and self._takes_part(standing):
            return replace(standing, plan_ranks=())
        return None

    async def _vote(self, standing: Standing) -> tuple[int, ...] | None:
        """Return the decided members of the next formation, or ``None`` when a newer generation ends the vote."""
        instance = FormationId(generation=standing.formation.generation, number=standing.formation.number + 1)
        self._standing = standing
        self._peers.watch({key_of(m): m for m in self._members(standing)})
        self._break("a member left or was lost")
        await self._peers.ping_all(RETRY_S)
        while instance not in self._book.decided:
            if self._newer_generation(standing) or self._gives_up(standing):
                return None
            if self._finished and not await self._is_needed(standing):
                return None
            up = [rank for rank in standing.plan_ranks if self._is_up(standing.plan, rank)]
            staying = tuple(rank for rank in up if rank not in standing.leaving)
            # Everybody goes: a vote about nobody tells the leavers that they are agreed.
            leader = min(staying) if staying else min(up)
            enough = len(workers_of(standing.plan, staying)) >= standing.plan.min_replicas or not staying
            settled = not any(self._peers.is_undetermined(self._key(standing.plan, r)) for r in standing.plan_ranks)
            possible = enough and paxos.is_majority(len(up), len(standing.plan_ranks))
            if settled and not possible and self._leave_at is not None:
                self._leave_at = self._peers.loop.time()  # those who stay wait for the operator: our vote is no use
                continue
            if settled and not possible:
                self._say(f"{len(up)} of {len(standing.plan_ranks)} members are left: waiting for the operator's plan")
            if settled and possible and self._key(standing.plan, leader) == self._me:
                await self._propose(standing, instance, leader, staying)
            else:
                await self._learn(standing, instance, up)
            if instance not in self._book.decided:
                await self._peers.wait_change(RETRY_S)
        ranks = self._book.decided[instance]
        _log.info("formation %s: ranks %s of the plan take part", instance, list(ranks))
        return ranks

    async def _propose(self, standing: Standing, instance: FormationId, rank: int, wish: tuple[int, ...]) -> None:
        acceptors = self._members(standing)
        seen = self._acceptor(instance).promised
        number = Ballot(number=seen.number + 1 if seen else 1, rank=rank)
        body: dict[str, Any] = {"formation": _pack(instance), "ballot": [number.number, number.rank]}
        own, promised = paxos.prepare(self._acceptor(instance), number)
        self._book.acceptors[instance] = own
        if not promised:
            return
        others = [m for m in acceptors if key_of(m) != self._me and self._peers.is_up(key_of(m))]
        replies = await self._peers.ask_all(others, "prepare", body)
        promises = [reply for reply in replies.values() if reply.get("promised")]
        if not paxos.is_majority(1 + len(promises), len(acceptors)):
            return
        going = {key for key, reply in replies.items() if reply.get("leaving")}
        if self._leave_at is not None:
            going.add(self._me)
        wish = tuple(member for member in wish if self._key(standing.plan, member) not in going)
        if wish and len(workers_of(standing.plan, wish)) < standing.plan.min_replicas:
            return
        ranks = paxos.value_to_propose(wish, [own.accepted, *(_unpack_accepted(p.get("accepted")) for p in promises)])
        own, voted = paxos.accept(self._acceptor(instance), number, ranks)
        self._book.acceptors[instance] = own
        if not voted:
            return
        replies = await self._peers.ask_all(others, "accept", body | {"ranks": list(ranks)})
        votes = 1 + sum(bool(reply.get("accepted")) for reply in replies.values())
        if paxos.is_majority(votes, len(acceptors)):
            self._book.decided[instance] = ranks
            await self._peers.ask_all(others, "decided", {"formation": _pack(instance), "ranks": list(ranks)})

    async def _learn(self, standing: Standing, instance: FormationId, up: list[int]) -> None:
        others = [standing.plan.members[rank] for rank in up if self._key(standing.plan, rank) != self._me]
        replies = await self._peers.ask_all(others, "status", {"formation": _pack(instance)}, timeout_s=RETRY_S)
        for reply in replies.values():
            if reply.get("decided") is not None:
                self._book.decided[instance] = tuple(reply["decided"])

    async def _enter(self, standing: Standing) -> Entry | None:
        """Return when everybody has arrived; ``None`` when somebody was lost meanwhile or a newer plan came."""
        formation = standing.formation
        self._standing = standing
        members = self._members(standing)
        self._peers.watch({key_of(m): m for m in members})
        host = members[0]
        if key_of(host) != self._me:
            return await self._arrive(standing, host)
        arrived = self._book.arrived.setdefault(formation, {})
        arrived[self._me] = self._has_cuda
        while not {key_of(m) for m in members} <= arrived.keys():
            if self._outdated(standing):
                return None
            await self._peers.wait_change(RETRY_S)
        hosted = self._host_store()
        all_cuda = all(arrived[key_of(m)] for m in members)
        self._book.stores[formation] = (hosted.port, all_cuda)
        others = [m for m in members if key_of(m) != self._me]
        replies = await self._peers.ask_all(
            others, "store", {"formation": _pack(formation), "store": [hosted.port, all_cuda]}
        )
        if not all(reply.get("comes") for reply in replies.values()) or len(replies) < len(others):
            self._break("a member thought better of it")  # otherwise those who come would wait for it in vain
            return None
        return Entry(
            standing=standing, store_address=host.address, store_port=hosted.port, all_cuda=all_cuda, hosted=hosted
        )  # fmt: skip

    async def _arrive(self, standing: Standing, host: Member) -> Entry | None:
        formation = standing.formation
        while formation not in self._book.stores:  # whoever was told where the store is has promised to come
            if self._outdated(standing):
                return None
            await self._peers.request(host, "arrived", {"formation": _pack(formation), "cuda": self._has_cuda})
            if formation not in self._book.stores:
                await self._peers.wait_change(RETRY_S)
        port, all_cuda = self._book.stores[formation]
        return Entry(standing=standing, store_address=host.address, store_port=port, all_cuda=all_cuda)

    def _outdated(self, standing: Standing) -> bool:
        """Return whether it is in vain to wait for the others to arrive; tells them, too."""
        if self._newer_generation(standing) or self._gives_up(standing):
            self._break("a newer plan came, or a member has to go")
        return standing.formation in self._book.broken

    def _gives_up(self, standing: Standing | None) -> bool:
        if self._leave_at is None:
            return False
        return standing is None or not self._takes_part(standing) or self._peers.loop.time() >= self._leave_at

    def _newer_generation(self, standing: Standing) -> bool:
        held = self._peers.source.newest
        return held is not None and held.plan.generation > standing.plan.generation

    async def _is_needed(self, standing: Standing) -> bool:
        """Return whether a peer that still answers has not committed everything."""
        others = [m for m in self._members(standing) if key_of(m) != self._me]
        replies = await self._peers.ask_all(others, "status", {"formation": _pack(standing.formation)})
        return not all(reply.get("finished") for reply in replies.values())

    # -- breaking ----------------------------------------------------------------------------------------------------

    def _on_lost(self, key: PeerKey, reason: str) -> None:
        standing = self._standing
        if standing is not None and any(key_of(m) == key for m in self._members(standing)):
            self._break(f"peer {key[0]}/{key[1]} {reason}")

    def _break(self, reason: str) -> None:
        """Give the current formation up and tell the others, so that nobody waits for a time-out."""
        standing = self._standing
        if standing is None or standing.formation in self._book.broken:
            return
        self._mark_broken(reason)
        others = [m for m in self._members(standing) if key_of(m) != self._me and self._peers.is_up(key_of(m))]
        telling = self._peers.ask_all(others, "broken", {"formation": _pack(standing.formation)})
        self._telling = self._peers.loop.create_task(telling)  # kept: a task nobody holds may be collected

    # -- what peers ask ----------------------------------------------------------------------------------------------

    async def _on_prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        instance, number = _unpack(message["formation"]), Ballot(number=message["ballot"][0], rank=message["ballot"][1])
        self._broken_before(instance)
        acceptor, promised = paxos.prepare(self._acceptor(instance), number)
        self._book.acceptors[instance] = acceptor
        accepted = acceptor.accepted
        return {
            "promised": promised,
            "leaving": self._leave_at is not None,
            "accepted": [[accepted.ballot.number, accepted.ballot.rank], list(accepted.ranks)] if accepted else None,
        }

    async def _on_accept(self, message: dict[str, Any]) -> dict[str, Any]:
        instance, number = _unpack(message["formation"]), Ballot(number=message["ballot"][0], rank=message["ballot"][1])
        acceptor, accepted = paxos.accept(self._acceptor(instance), number, tuple(message["ranks"]))
        self._book.acceptors[instance] = acceptor
        return {"accepted": accepted}

    async def _on_decided(self, message: dict[str, Any]) -> dict[str, Any]:
        instance = _unpack(message["formation"])
        self._book.decided[instance] = tuple(message["ranks"])
        self._broken_before(instance)
        self._peers.nudge()
        return {}

    async def _on_arrived(self, message: dict[str, Any]) -> dict[str, Any]:
        formation = _unpack(message["formation"])
        key = (str(message["from"][0]), int(message["from"][1]))
        self._book.arrived.setdefault(formation, {})[key] = bool(message["cuda"])
        self._peers.nudge()
        return {}

    async def _on_store(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take the store's place as a summons; to answer yes is to promise to come."""
        formation = _unpack(message["formation"])
        waiting = self._standing is not None and self._standing.formation == formation
        comes = waiting and formation not in self._book.broken
        if comes:
            self._book.stores[formation] = (int(message["store"][0]), bool(message["store"][1]))
            self._peers.nudge()
        return {"comes": comes}

    async def _on_broken_elsewhere(self, message: dict[str, Any]) -> dict[str, Any]:
        formation = _unpack(message["formation"])
        if self._standing is not None and self._standing.formation == formation:
            self._mark_broken("a peer found the formation broken")
        return {}

    async def _on_status(self, message: dict[str, Any]) -> dict[str, Any]:
        instance = _unpack(message["formation"])
        decided = self._book.decided.get(instance)
        return {"decided": list(decided) if decided is not None else None, "finished": self._finished}

    def _broken_before(self, instance: FormationId) -> None:
        """Leave a formation whose successor is being voted on."""
        if self._standing is not None and self._standing.formation < instance:
            self._mark_broken(f"peers vote on formation {instance}")

    def _mark_broken(self, reason: str) -> None:
        if self._standing is not None and self._standing.formation not in self._book.broken:
            self._book.broken.add(self._standing.formation)
            self._on_broken(reason)
            self._peers.nudge()

    # -- small views -------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Log a state of waiting, once until it changes."""
        if text != self._said:
            self._said = text
            _log.info("%s", text)

    def _acceptor(self, instance: FormationId) -> Acceptor:
        return self._book.acceptors.get(instance, Acceptor())

    def _members(self, standing: Standing) -> list[Member]:
        return [standing.plan.members[rank] for rank in standing.plan_ranks]

    def _key(self, plan: Plan, rank: int) -> PeerKey:
        return key_of(plan.members[rank])

    def _is_up(self, plan: Plan, rank: int) -> bool:
        key = self._key(plan, rank)
        return key == self._me or self._peers.is_up(key)

    def _takes_part(self, standing: Standing) -> bool:
        return any(key_of(m) == self._me for m in self._members(standing))

    def _leaves(self, standing: Standing) -> bool:
        return any(self._key(standing.plan, rank) == self._me for rank in standing.leaving)


def _whole(held: Held) -> Standing:
    ranks = tuple(member.rank for member in held.plan.members)
    return Standing(held=held, formation=FormationId(generation=held.plan.generation, number=0), plan_ranks=ranks)


def _pack(formation: FormationId) -> list[int]:
    return [formation.generation, formation.number]


def _unpack(raw: Any) -> FormationId:
    return FormationId(generation=int(raw[0]), number=int(raw[1]))


def _unpack_accepted(raw: Any) -> Accepted | None:
    return Accepted(ballot=Ballot(number=raw[0][0], rank=raw[0][1]), ranks=tuple(raw[1])) if raw else None
