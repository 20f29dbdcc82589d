"""How a formation comes about: who takes part (the plan, or a vote of the survivors), and then everybody's arrival.

A new generation needs no vote: the plan names its members. When members of ``g.k`` are lost or leave, those who are left
vote on ``g.(k+1)`` (``election``). Either way the lowest rank that takes part waits until all others have arrived, starts
a fresh store and tells them where it is: a store that outlives its formation hands stale addresses to the next one.

Everything here runs in the peer service's loop; the training thread waits for the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from heterotrain_core.contract.plan import Member

from heterotrain.errors import Excluded
from heterotrain.membership.consensus.election import RETRY_S, Election
from heterotrain.membership.consensus.peer_state import Ledger
from heterotrain.membership.devices import Marks
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.roster import FormationId
from heterotrain.membership.standing import Entry, Standing, pack, whole
from heterotrain.network.heartbeat import key_of
from heterotrain.network.rendezvous import HostedStore


class Assembly:
    """Finds the next formation together with the peers."""

    def __init__(
        self,
        peers: PeerService,
        *,
        device: Marks,
        host_store: Callable[[], HostedStore],
        on_broken: Callable[[str], None],
    ) -> None:
        self._peers = peers
        self._device = device
        self._host_store = host_store
        self._ledger = Ledger(peers, on_broken=on_broken)
        self._election = Election(peers, self._ledger)

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
        if self._ledger.leave_at is None:
            self._ledger.leave_at = self._peers.loop.time() + within_s
            self._peers.nudge()

    def is_broken(self, formation: FormationId) -> bool:
        """Return whether the formation has been given up."""
        return formation in self._ledger.broken

    def finish(self) -> None:
        """Say from now on that this rank has committed everything."""
        self._ledger.finished = True

    # -- the way to a formation --------------------------------------------------------------------------------------

    async def _next_formation(self, standing: Standing | None, *, patience_s: float) -> Entry | None:
        me = self._ledger.me
        deadline = self._peers.loop.time() + patience_s
        while not await self._may_go(standing):
            newer = self._newer_standing(standing)
            if newer is not None:
                standing = newer
                entry = await self._enter(standing) if standing.takes_part(me) else None
                if entry is not None:
                    return entry
                continue
            if standing is None or not standing.takes_part(me):
                if standing is not None and self._peers.loop.time() > deadline:
                    raise Excluded(f"the others went on without {self._peers.identity.name} and no plan names it")
                await self._peers.wait_change(RETRY_S)
                continue
            ranks = await self._election.vote(standing)
            if ranks is None:
                continue
            standing = replace(standing, formation=standing.next_formation, plan_ranks=ranks)
            if standing.takes_part(me) and not standing.leaves(me):
                entry = await self._enter(replace(standing, leaving=frozenset()))
                if entry is not None:
                    return entry
            deadline = self._peers.loop.time() + patience_s
        return None

    async def _may_go(self, standing: Standing | None) -> bool:
        """Return whether this rank needs no formation any more: it leaves, or everything is done."""
        ledger = self._ledger
        if ledger.gives_up(standing):
            return True
        if standing is None:
            return False
        if standing.leaves(ledger.me) and not standing.takes_part(ledger.me):
            return True
        return ledger.finished and not await ledger.is_needed(standing)

    def _newer_standing(self, standing: Standing | None) -> Standing | None:
        """Return where a newer generation puts this rank: into it, or out of its formation; ``None`` for no change."""
        held = self._peers.source.newest
        if held is None or held.plan.generation <= (standing.plan.generation if standing else 0):
            return None
        self._ledger.forget_before(held.plan.generation)
        if any(key_of(m) == self._ledger.me for m in held.plan.members):
            return whole(held)
        if standing is not None and standing.takes_part(self._ledger.me):
            return replace(standing, plan_ranks=())
        return None

    async def _enter(self, standing: Standing) -> Entry | None:
        """Return when everybody has arrived; ``None`` when somebody was lost meanwhile or a newer plan came."""
        ledger, formation, members = self._ledger, standing.formation, standing.members
        ledger.standing = standing
        self._peers.watch(members)
        if formation.number == 0:
            self._peers.links.begin_anew()  # the operator names them, whatever became of them in an earlier generation
        host = members[0]
        if key_of(host) != ledger.me:
            return await self._arrive(standing, host)
        arrived = ledger.arrived.setdefault(formation, {})
        arrived[ledger.me] = self._device
        while not {key_of(m) for m in members} <= arrived.keys():
            if self._outdated(standing):
                return None
            await self._peers.wait_change(RETRY_S)
        hosted = self._host_store()
        devices = tuple(arrived[key_of(m)] for m in members)
        ledger.stores[formation] = (hosted.port, devices)
        others = standing.others(ledger.me)
        body = {"formation": pack(formation), "store": [hosted.port, devices]}
        replies = await self._peers.ask_all(others, "store", body)
        if not all(reply.get("comes") for reply in replies.values()) or len(replies) < len(others):
            ledger.give_up("a member thought better of it")  # otherwise those who come would wait for it in vain
            return None
        return Entry(
            standing=standing, store_address=host.address, store_port=hosted.port, devices=devices, hosted=hosted
        )  # fmt: skip

    async def _arrive(self, standing: Standing, host: Member) -> Entry | None:
        formation, stores = standing.formation, self._ledger.stores
        while formation not in stores:  # whoever was told where the store is has promised to come
            if self._outdated(standing):
                return None
            await self._peers.request(host, "arrived", {"formation": pack(formation), "device": self._device})
            if formation not in stores:
                await self._peers.wait_change(RETRY_S)
        port, devices = stores[formation]
        return Entry(standing=standing, store_address=host.address, store_port=port, devices=devices)

    def _outdated(self, standing: Standing) -> bool:
        """Return whether it is in vain to wait for the others to arrive; tells them, too."""
        if self._ledger.is_outranked(standing) or self._ledger.gives_up(standing):
            self._ledger.give_up("a newer plan came, or a member has to go")
        # Whoever was lost while the others still voted for it is lost for this formation, too, and nobody says so again.
        elif any(self._peers.links.is_lost(key_of(member)) for member in standing.others(self._ledger.me)):
            self._ledger.give_up("a member was lost before it had arrived")
        return standing.formation in self._ledger.broken
