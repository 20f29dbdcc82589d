"""Rendezvous of a formation: its members are determined (by the plan or a vote), then all of them arrive.

A new generation needs no vote: the plan names its members. When members of ``g.k`` are lost or leave, the remaining
ones vote on ``g.(k+1)`` (``election``). In both cases the lowest member rank waits until all others have arrived.
It then makes a new store and announces it: a store that outlives its formation would hand stale addresses to the next
one.

Everything here runs in the peer service's loop; the training thread waits for the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from heterotrain_core.contract.plan import Rank

from heterotrain.errors import Excluded
from heterotrain.membership.consensus.election import RETRY_S, Election
from heterotrain.membership.consensus.peer_state import PeerState
from heterotrain.membership.devices import DeviceIds
from heterotrain.membership.formation import FormationMembership, RendezvousResult, first_membership
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.roster import FormationId
from heterotrain.network.connection_setup import HostedStore
from heterotrain.network.heartbeat import key_of

_log = logging.getLogger(__name__)


class Rendezvous:
    """Finds the next formation together with the peers."""

    def __init__(
        self,
        peers: PeerService,
        *,
        device: DeviceIds,
        host_store: Callable[[], HostedStore],
        on_broken: Callable[[str], None],
        on_spare: Callable[[str], None] = lambda _why: None,
    ) -> None:
        """Answer peers from now on.

        Args:
            peers: the peer service.
            device: identifiers of this rank's device.
            host_store: starts a store.
            on_broken: called with the reason when this rank's formation has been given up.
            on_spare: called with the reason when this rank waits as a spare, with an empty one when it takes part.
        """
        self._peers = peers
        self._on_spare = on_spare
        self._spare = ""
        self._device = device
        self._host_store = host_store
        self._state = PeerState(peers, on_broken=on_broken)
        self._election = Election(peers, self._state)

    # -- from the training thread ------------------------------------------------------------------------------------

    def next_formation(self, membership: FormationMembership | None, *, patience_s: float) -> RendezvousResult | None:
        """Return the next formation that this rank takes part in; ``None`` when it left or no peer needs it any more.

        Args:
            membership: the formation that ended, or ``None`` for a process that has not been in one yet.
            patience_s: how long an excluded rank waits for a plan that names it. A spare waits without a limit.

        Raises:
            Excluded: the other members continued without this rank.
        """
        return self._peers.call(self._next_formation(membership, patience_s=patience_s)).result()

    def adopt(self, membership: FormationMembership) -> bool:
        """Name the current formation as in a newer generation with the same members, without a rendezvous.

        Returns ``False``, and changes nothing, if the formation has been given up meanwhile.
        """
        return self._peers.call(self._adopt(membership)).result()

    def leave_soon(self, within_s: float) -> None:
        """Wait no longer than ``within_s`` for a formation, since this rank has to leave. Safe in a signal handler."""
        if self._state.leave_at is None:
            self._state.leave_at = self._peers.loop.time() + within_s
            self._peers.notify()

    def is_broken(self, formation: FormationId) -> bool:
        """Return whether the formation has been given up."""
        return formation in self._state.broken

    def finish(self) -> None:
        """Report to peers from now on that this rank has committed everything."""
        self._state.finished = True
        self._peers.heartbeats.ends_expected = True

    # -- the way to a formation --------------------------------------------------------------------------------------

    async def _next_formation(
        self, membership: FormationMembership | None, *, patience_s: float
    ) -> RendezvousResult | None:
        me = self._state.me
        deadline = self._peers.loop.time() + patience_s
        while not await self._is_finished(membership):
            newer = self._newer_membership(membership)
            if newer is not None:
                membership = newer
                result = await self._enter(membership) if membership.takes_part(me) else None
                if result is not None:
                    return result
                continue
            if membership is None or not membership.takes_part(me):
                if self._waits_as_spare(membership):
                    deadline = self._peers.loop.time() + patience_s
                elif membership is not None and self._peers.loop.time() > deadline:
                    raise Excluded(f"the others continued without {self._peers.identity.name} and no plan names it")
                await self._peers.wait_change(RETRY_S)
                continue
            ranks = await self._election.vote(membership)
            if ranks is None:
                continue
            membership = replace(membership, formation=membership.next_formation, plan_ranks=ranks)
            if membership.takes_part(me) and not membership.leaves(me):
                result = await self._enter(replace(membership, leaving=frozenset()))
                if result is not None:
                    return result
            deadline = self._peers.loop.time() + patience_s
        return None

    def _waits_as_spare(self, membership: FormationMembership | None) -> bool:
        """Return whether this rank waits for the next plan however long that takes, with its state.

        It does if the newest plan names its worker as a spare, or if the others went on without its member because a
        rank of that was lost: the operator sees that loss and makes a new plan. A member that was left out although
        all its ranks are there ends instead, since nobody else would know.
        """
        held, why = self._peers.source.newest, ""
        if held is not None and (membership is None or held.plan.generation > membership.plan.generation):
            if self._peers.identity.worker in held.plan.spares:
                why = f"plan {held.plan.generation}.{held.plan.revision} has no member for it"
        elif membership is not None:
            mates = membership.mates(self._state.me)
            if lost := [f"{m.worker}/{m.local_rank}" for m in mates if self._peers.heartbeats.is_lost(key_of(m))]:
                why = f"its member lost {', '.join(lost)}"
        if why != self._spare:
            self._set_spare(why)
        return bool(why)

    def _set_spare(self, why: str) -> None:
        self._spare = why
        self._on_spare(why)
        if why:
            _log.info("this rank waits as a spare and keeps its state: %s", why)

    async def _adopt(self, membership: FormationMembership) -> bool:
        state = self._state
        if state.membership is None or state.membership.formation in state.broken:
            return False
        state.forget_before(membership.plan.generation)
        state.membership = membership
        self._peers.watch(membership.ranks)
        return True

    async def _is_finished(self, membership: FormationMembership | None) -> bool:
        """Return whether this rank no longer needs a formation: it leaves, or everything is done."""
        state = self._state
        if state.has_stopped_waiting(membership):
            return True
        if membership is None:
            return False
        if membership.leaves(state.me) and not membership.takes_part(state.me):
            return True
        return state.finished and not await state.is_needed(membership)

    def _newer_membership(self, membership: FormationMembership | None) -> FormationMembership | None:
        """Return the membership that a newer generation gives this rank; ``None`` for no change.

        The rank is either a member of the new generation or no longer a member of its formation.
        """
        held = self._peers.source.newest
        if held is None or held.plan.generation <= (membership.plan.generation if membership else 0):
            return None
        self._state.forget_before(held.plan.generation)
        if any(key_of(rank) == self._state.me for rank in held.plan.ranks):
            return first_membership(held)
        if membership is not None and membership.takes_part(self._state.me):
            return replace(membership, plan_ranks=())
        return None

    async def _enter(self, membership: FormationMembership) -> RendezvousResult | None:
        """Return the result when all members have arrived; ``None`` when a member was lost or a newer plan came."""
        state, formation, ranks = self._state, membership.formation, membership.ranks
        state.membership = membership
        self._peers.watch(ranks)
        if self._spare:
            self._set_spare("")
        if formation.number == 0:
            # The operator names these members, regardless of losses in an earlier generation.
            self._peers.heartbeats.forget_losses()
        host = ranks[0]
        if key_of(host) != state.me:
            return await self._arrive(membership, host)
        arrived = state.arrived.setdefault(formation, {})
        arrived[state.me] = self._device
        while not {key_of(rank) for rank in ranks} <= arrived.keys():
            if self._outdated(membership):
                return None
            await self._peers.wait_change(RETRY_S)
        hosted = self._host_store()
        devices = tuple(arrived[key_of(rank)] for rank in ranks)
        state.stores[formation] = (hosted.number, devices)
        others = membership.others(state.me)
        body = {"formation": formation, "store": [hosted.number, devices]}
        replies = await self._peers.ask_all(others, "store", body)
        if not all(reply.get("comes") for reply in replies.values()) or len(replies) < len(others):
            state.give_up("a member no longer joins it")  # otherwise the members that come would wait for it
            hosted.table.close()
            return None
        return RendezvousResult(membership=membership, store_number=hosted.number, devices=devices, hosted=hosted)

    async def _arrive(self, membership: FormationMembership, host: Rank) -> RendezvousResult | None:
        formation, stores = membership.formation, self._state.stores
        while formation not in stores:  # a member that has the store's address has promised to come
            if self._outdated(membership):
                return None
            await self._peers.request(host, "arrived", {"formation": formation, "device": self._device})
            if formation not in stores:
                await self._peers.wait_change(RETRY_S)
        number, devices = stores[formation]
        return RendezvousResult(membership=membership, store_number=number, devices=devices)

    def _outdated(self, membership: FormationMembership) -> bool:
        """Return whether waiting for the others has become pointless; notifies them in that case."""
        if self._state.is_superseded(membership) or self._state.has_stopped_waiting(membership):
            self._state.give_up("a newer plan came, or a member has to go")
        # A member lost while the others still voted for it is lost for this formation too, and is not reported again.
        elif any(self._peers.heartbeats.is_lost(key_of(peer)) for peer in membership.others(self._state.me)):
            self._state.give_up("a member was lost before it had arrived")
        return membership.formation in self._state.broken
