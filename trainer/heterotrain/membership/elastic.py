"""Membership under the operator: the operator names generations, and survivors make formations by themselves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.plan import Rank

from heterotrain.errors import PeerLost, UsageError
from heterotrain.membership.agreement import agree_on_plan, agree_on_state
from heterotrain.membership.consensus.rendezvous import Rendezvous
from heterotrain.membership.devices import BackendChoice, choose_backend, device_ids
from heterotrain.membership.formation import FormationMembership, RendezvousResult
from heterotrain.membership.interface import ActiveGroup, OwnSide
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.plan_source import HeldPlan, PlanSource
from heterotrain.membership.roster import roster_of
from heterotrain.network.authentication import Credentials
from heterotrain.network.group import Group
from heterotrain.network.hang import Activity, HangWatch, from_reply, to_reply
from heterotrain.network.heartbeat import PeerKey, key_of
from heterotrain.network.peer_sockets import SocketFilter

_log = logging.getLogger(__name__)


class Elastic:
    """Membership in an operated job."""

    def __init__(self, own: OwnSide, *, on_spare: Callable[[str], None] = lambda _why: None) -> None:
        """Listen for peers and plans from now on.

        Args:
            own: this rank.
            on_spare: called with the reason when this rank waits as a spare, with an empty one when it takes part.

        Raises:
            UsageError: the peer port is missing or in use.
        """
        identity = own.identity
        if identity.peer_port is None:
            raise UsageError("an operated job needs a peer port: start the script in a worker pod of the operator")
        self._own, self._identity = own, identity
        self._why_gloo = ""
        self._group: Group | None = None
        self._ranks: list[Rank] = []
        self._watch: HangWatch | None = None
        self._source = PlanSource(identity.plan_dir, job_uid=identity.job_uid)
        self._credentials = Credentials(secret=identity.secret)
        self._peers = PeerService(
            identity, self._source, timeout_s=own.timeout_s, credentials=self._credentials, clock=own.clock
        )
        self._rendezvous = Rendezvous(
            self._peers,
            device=device_ids(own.device),
            host_store=self._peers.host_store,
            on_broken=self._on_broken,
            on_spare=on_spare,
        )
        self._peers.start()
        self._source.start()

    def form(self, previous: FormationMembership | None) -> ActiveGroup | None:
        """Return the next active group; tries again while members are lost during the setup."""
        if self._watch is None:  # created here, because this is the training thread
            self._watch = self._own.watch_waits(lambda: self._group, self._ask)
            self._peers.handlers["doing"] = self._on_activity
        membership = previous
        while True:
            result = self._rendezvous.next_formation(membership, patience_s=2 * self._own.timeout_s)
            if result is None:
                return None
            membership = result.membership
            active_group = self._connect(result)
            if active_group is not None:
                return active_group
            del result  # also drops the store, which wakes members that still wait for its keys

    def adopt(self, membership: FormationMembership) -> bool:
        """Take a new generation with the same members as the current formation; return whether that is intact."""
        adopted = self._rendezvous.adopt(membership)
        if adopted:
            self._ranks = membership.ranks
        return adopted

    def newest(self) -> HeldPlan | None:
        """Return the newest plan that this rank has received."""
        return self._source.newest

    def offer(self, text: str) -> None:
        """Take a plan from a peer."""
        self._source.offer(text)

    def gauges(self) -> Mapping[str, float]:
        """Return for how long the training thread has waited for other ranks; nothing without a formation.

        It is 0 while the thread runs code of its own. Safe from any thread.
        """
        group = self._group
        if group is None:
            return {}
        waiting = group.waiting
        return {names.WAITING_SECONDS: self._own.clock() - waiting.since_s if waiting is not None else 0.0}

    def leave_soon(self, within_s: float) -> None:
        """Wait no longer than ``within_s`` seconds for a formation."""
        self._rendezvous.leave_soon(within_s)

    def everything_committed(self) -> None:
        """Note that only ranks that have not committed everything still need this rank."""
        self._rendezvous.finish()

    def abandon(self, reason: str) -> None:
        """Break all connections at once; heartbeats would otherwise keep this rank in the formation."""
        self._on_broken(reason)
        self.close()

    def close(self) -> None:
        """Stop all threads and close all connections."""
        if self._watch is not None:
            self._watch.close()
        self._source.close()
        self._peers.close()

    def _connect(self, result: RendezvousResult) -> ActiveGroup | None:
        membership = result.membership
        ranks = membership.ranks
        me = (self._identity.worker_uid, self._identity.local_rank)
        rank = next(i for i, each in enumerate(ranks) if key_of(each) == me)
        sockets = SocketFilter(
            members=frozenset(each.address for each in ranks),
            excluded_ports=frozenset(each.peer_port for each in ranks) | {self._identity.metrics_port or 0},
        )
        self._ranks = ranks
        group = self._group = Group(
            rank=rank, world_size=len(ranks), sockets=sockets, hosted=result.hosted, clock=self._own.clock
        )
        if self._rendezvous.is_broken(membership.formation):
            group.cut("given up before it was built")
        try:
            choice = self._choose(result)
            group.build(
                connect=lambda: self._peers.connect_store(ranks[0], result.store_number),
                topology=choice.topology,
                own_address=self._identity.address,
                credentials=self._credentials,
            )
            held = self._source.newest
            mine = held if held and held.plan.generation == membership.plan.generation else membership.held
            agreed = agree_on_plan(group, mine, job_uid=self._identity.job_uid)
            place = partial(self._own.place, agreed.plan, membership.plan_ranks[rank])
            agree_on_state(group, self._own.training, self._own.checkpoints, place=place)
        except PeerLost as lost:
            _log.warning("formation %s failed: %s", membership.formation, lost)
            group.cut(str(lost))
            group.close()
            return None
        progress = self._own.training.progress
        roster = roster_of(
            agreed.plan,
            plan_ranks=membership.plan_ranks,
            formation=membership.formation,
            epoch=progress.epoch,
            epoch_step=progress.epoch_steps,
        )
        _log.info("formation %s: rank %d of %d, shares %s", membership.formation, rank, len(ranks), list(roster.shares))
        return ActiveGroup(membership=membership, roster=roster, rank=rank, group=group, agreed=agreed)

    def _choose(self, result: RendezvousResult) -> BackendChoice:
        """Return the backend for gradients; logs once why not all GPUs use NCCL with each other.

        Raises:
            UsageError: NCCL is required, but the members' devices cannot use it.
        """
        names = [f"{rank.worker}/{rank.local_rank}" for rank in result.membership.ranks]
        choice = choose_backend(self._own.backend, result.devices, names)
        if choice.reason and choice.reason != self._why_gloo:
            _log.info("%s", choice)
        self._why_gloo = choice.reason
        return choice

    def _ask(self) -> list[Activity]:
        """Return the reported activity of every peer of the formation."""
        me = (self._identity.worker_uid, self._identity.local_rank)
        others = {rank: peer for rank, peer in enumerate(self._ranks) if key_of(peer) != me}
        replies: dict[PeerKey, dict[str, Any]] = {}
        with contextlib.suppress(RuntimeError, CancelledError):  # the peer service is closed: everything is over
            replies = self._peers.call(self._peers.ask_all(list(others.values()), "doing", {})).result()
        return [
            from_reply(rank, f"{peer.worker}/{peer.local_rank}", replies.get(key_of(peer)))
            for rank, peer in others.items()
        ]

    async def _on_activity(self, _message: dict[str, Any]) -> dict[str, Any]:
        return to_reply(self._watch.activity()) if self._watch is not None else {}

    def _on_broken(self, reason: str) -> None:
        if self._group is not None:
            self._group.cut(reason)
