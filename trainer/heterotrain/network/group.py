"""The connections of one formation: sums, a mesh for the ranks' own messages, the member's, and the script's.

A formation gets new groups on a new store. ``cut`` may be called from any thread at any time and makes every waiting
operation fail; ``close`` belongs to the training thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from heterotrain.clock import Clock
from heterotrain.errors import PeerLost
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.authentication import Credentials
from heterotrain.network.connection_attempt import Attempt
from heterotrain.network.connection_setup import SETUP_S, HostedStore, gloo_device_address, make_group
from heterotrain.network.connections import Connections, Waiting
from heterotrain.network.gloo.abort import OpenSocket, interface_of, open_sockets
from heterotrain.network.gloo.default_group import publish, withdraw
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.network.gloo.script_group import ScriptCollectives
from heterotrain.network.mesh.connect import connect as connect_mesh
from heterotrain.network.nccl import COLLECTIVE_S, abort, join_nccl, release
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain.network.sums import FlatSums, FlatTopology, Reduction, Sums, Topology, owners_to_connect


class Group(Connections):
    """The connections of one formation, from this rank's side.

    Attributes:
        script: the script's own collectives.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        sockets: SocketFilter,
        hosted: HostedStore | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make a group that is not connected yet; see ``Connections``."""
        super().__init__(rank=rank, world_size=world_size, sockets=sockets, hosted=hosted, clock=clock)
        self.script = ScriptCollectives(self)
        self._topology: Topology = FlatTopology("gloo")
        self._sums: Sums | None = None
        self._owners: dict[tuple[int, ...], Sums] = {}
        self._aborts: list[threading.Thread] = []
        self._member: MemberGroup | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def build(
        self, *, connect: Callable[[], Any], topology: Topology, own_address: str | None, credentials: Credentials
    ) -> None:
        """Connect to all other ranks.

        Args:
            connect: connects to the store.
            topology: connects the ranks for sums.
            own_address: address of this rank, which determines the interface for gloo; ``None`` leaves it to gloo.
            credentials: of the job.

        Raises:
            PeerLost: a member was lost meanwhile.
        """
        self._topology = topology
        self.flag = AbortFlag(is_pinned=topology.uses_nccl(self.rank))
        self.gloo_address = gloo_device_address(own_address)
        if own_address and ":" in own_address:
            os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6")
        elif own_address and (name := interface_of(own_address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        self.check()

        def store() -> Any:
            self.store = connect()
            if self._cut:  # it came too late to be cut with the rest
                self.end_store()
            return self.store

        def connect_all() -> tuple[Any, Any, Sums]:
            found, rank, world_size = store(), self.rank, self.world_size
            mesh = connect_mesh(
                found,
                rank=rank,
                world_size=world_size,
                address=own_address,
                within_s=SETUP_S,
                limit_s=COLLECTIVE_S,
                credentials=credentials,
            )
            sums = topology.connect(
                found, rank=rank, world_size=world_size, address=self.gloo_address, is_over=self.is_over
            )
            return found, mesh, sums

        self.store, self._mesh, self._sums = Attempt(connect_all).result(self.check)
        publish(self.script, rank=self.rank, world_size=self.world_size)
        self._join(self._nccl_groups(), self._sockets.before)
        self.check()

    def _join(self, groups: Sequence[Any], before: frozenset[OpenSocket]) -> None:
        """Complete the connections of NCCL's groups, and count all sockets since ``before`` as this group's.

        Raises:
            PeerLost: a rank was lost meanwhile.
        """
        watched = open_sockets()
        self.waiting = Waiting("the connections of NCCL", self.clock()) if groups else None
        try:
            for group in groups:
                join_nccl(group, self.check)
        finally:
            self.waiting = None
        self.own_sockets(before, watched)

    def cut(self, reason: str) -> None:
        """Make every operation of this group fail, now and later; safe from any thread."""
        super().cut(reason)
        if self._member is not None:
            self._member.cut(reason)

    def _abort(self) -> None:
        self._aborts = abort(self._nccl_groups(), self.flag)

    def check_whole(self) -> None:
        """Fail where a sum may be a part.

        Raises:
            PeerLost: a communicator may have been aborted.
        """
        self.check()
        if self.flag.is_up:
            raise PeerLost("the connections inside this rank's member were cut")

    @property
    def is_queued(self) -> bool:
        """Whether NCCL runs the sums of all ranks: then they are queued on every rank's device."""
        return isinstance(self._topology, FlatTopology) and self._topology.backend == "nccl"

    def close(self) -> None:
        """Drop the groups. Waits for their threads, so call it after ``cut`` or after the last operation."""
        if self._mesh is not None:
            self._mesh.close()
        withdraw()
        nccl = self._nccl_groups()
        if self._sums is not None:
            self._sums.close()
        self.script.close()
        if self._member is not None:
            self._member.leave_formation()
        self.end_store()
        self._sums = self.store = self._member = None
        self._owners.clear()
        if nccl:
            release(nccl, (self._aborts or abort(nccl, self.flag)) if self._cut else [])

    # -- sums --------------------------------------------------------------------------------------------------------

    def connect_owners(self, tuples: Sequence[tuple[int, ...]]) -> None:
        """Connect the ranks that hold the same parts of a divided model; every rank calls this at the same point.

        Args:
            tuples: the sets of ranks, each ascending, in the same order on every rank. A set of one rank, or of all
                ranks, needs no connections of its own.

        Raises:
            PeerLost: a rank was lost meanwhile.
            UsageError: as ``owners_to_connect``.
        """
        backend = self._topology.backend
        for owners in owners_to_connect(tuples, self.world_size):
            if self.rank not in owners or owners in self._owners:
                continue
            store, before, name = self.store, open_sockets(), f"owners {owners}"
            make, place = make_group(backend, self.gloo_address), owners.index(self.rank)
            attempt = Attempt(partial(make, store, name, rank=place, world_size=len(owners)))
            made = FlatSums(attempt.result(self.check), is_nccl=backend == "nccl", is_over=self.is_over)
            self._owners[owners] = made
            self._join(made.nccl_groups, before)
            self.check()

    def all_reduce(self, flat: torch.Tensor, owners: tuple[int, ...] | None = None) -> Reduction:
        """Start to sum ``flat`` (one dimension, of the same length and format on every rank) in place.

        Args:
            flat: the numbers.
            owners: the ranks whose numbers are added up, as in ``connect_owners``; ``None`` for all.

        Raises:
            PeerLost: the group is broken.
        """
        sums = self._sums if owners is None else self._owners.get(owners, self._sums)
        if sums is None:
            raise PeerLost("the group is closed")
        # Gloo's thread writes a GPU's sum with ``copy_``, at any time, and torch counts that as a change. The alias
        # has a count of its own, so that the guards against changes by the script do not see it.
        alias = flat.data
        return self.guarded(lambda: sums.start(alias), RuntimeError)

    @property
    def sums_on_device(self) -> bool:
        """Whether sums over all ranks are operations of NCCL in one group, for which the host does not wait."""
        return self._topology.backend == "nccl"

    def finish_device(self) -> None:
        """Wait until the accelerator has finished all queued work, then check that the group is intact.

        An aborted operation of NCCL looks finished; the optimizer must not run on its incomplete result
        (docs/adr/0034). Gloo's operations have ended when they have been waited for, with an error if they failed.

        Raises:
            PeerLost: the group is broken.
        """
        if torch.cuda.is_initialized() and (self._nccl_groups() or (self._member and self._member.is_nccl)):
            with self.named_wait("the accelerator, and the reductions queued on it"):
                torch.cuda.current_stream().synchronize()
            self.check()

    def _nccl_groups(self) -> list[Any]:
        """Return the groups whose operations NCCL runs."""
        sums = [] if self._sums is None else [self._sums, *self._owners.values()]
        return [group for each in sums for group in each.nccl_groups]

    # -- the ranks of one member -------------------------------------------------------------------------------------

    def attach(self, member: MemberGroup, name: str, backend: str) -> None:
        """End the operations of this rank's member together with this group.

        Args:
            member: the member's group.
            name: connects the member's ranks by this name, which is theirs alone; empty if they are connected.
            backend: as in ``MemberGroup.connect``.

        Raises:
            PeerLost: a rank was lost meanwhile.
        """

        def on_wait(what: str) -> None:
            self.waiting = Waiting(what, self.clock()) if what else None

        self._member = member
        if name:
            member.connect(
                self.store, name, check=self.check, backend=backend, addresses=self._sockets.addresses,
                excluded_ports=self._sockets.excluded_ports, address=self.gloo_address,
            )  # fmt: skip
        member.enter_formation(on_wait, self.is_over, self.flag)  # now: connecting ends earlier connections
        self.check()
