"""The connections of one formation: a group for gradients, and a mesh for the ranks' own messages.

A formation gets new groups on a new store. ``cut`` may be called from any thread at any time and makes every waiting
operation fail; ``close`` belongs to the training thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from heterotrain_core.contract.owners import MOST_OWNER_GROUPS

from heterotrain.clock import Clock
from heterotrain.errors import PeerLost, UsageError
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.authentication import Credentials
from heterotrain.network.connection_attempt import Attempt, short_message
from heterotrain.network.connection_setup import (
    HostedStore,
    c10d,
    connect_ranks,
    gloo_device_address,
    make_group,
)
from heterotrain.network.gloo.abort import OpenSocket, interface_of, open_sockets
from heterotrain.network.gloo.bounded_wait import BoundedWait, bounded, settle
from heterotrain.network.gloo.default_group import publish, withdraw
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.network.gloo.script_group import announcement, carried_by, check_alike
from heterotrain.network.key_store import close_store
from heterotrain.network.mesh.exchange import CALLS, AllGather, Exchange, Payload, Purpose
from heterotrain.network.mesh.mesh import Mesh, pack_floats, unpack_floats
from heterotrain.network.nccl import abort, join_nccl, length_s, release, settle_nccl
from heterotrain.network.peer_sockets import PeerSockets, SocketFilter
from heterotrain.network.two_levels import Levels, Reduction, TwoLevelGroup, TwoLevelWork

_log = logging.getLogger(__name__)
_Work = TypeVar("_Work")

NEWS_S = 2.0
"""Time until the loss of a peer shows after one of gloo's operations has failed with it; usually milliseconds."""
NOT_HERE = (
    "can be used inside `with step:` before step.apply, and in hooks such as those of job.on_epoch_end: elsewhere the "
    "loss of a worker would end the training, because nothing repeats the call"
)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """The operation that the training thread waits for, and the start of the wait on the group's clock."""

    what: str
    since_s: float


def owners_to_connect(tuples: Iterable[tuple[int, ...]], world_size: int) -> list[tuple[int, ...]]:
    """Return the sets of owners that need connections of their own.

    Raises:
        UsageError: there are more than ``MOST_OWNER_GROUPS``.
    """
    every = tuple(range(world_size))
    wanted = [owners for owners in dict.fromkeys(tuples) if len(owners) > 1 and owners != every]
    if len(wanted) > MOST_OWNER_GROUPS:
        raise UsageError(
            f"this division of the model needs {len(wanted)} groups of ranks, and at most {MOST_OWNER_GROUPS} are "
            "possible: divide it in the same way in more of the members"
        )
    return wanted


class Group:
    """The connections of one formation, from this rank's side.

    Attributes:
        waiting: the current wait of the training thread, for the hang watch; ``None`` when it does not wait.
        flag: raised before a communicator of this formation is aborted, this rank's member's included.
        is_open: whether the script may exchange data now, because the loss of a peer would repeat what it does.
        script_exchanges: number of exchanges that the script has started in this formation.
        summed_bytes: handed to sums with other ranks, until a committed step takes the count.
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
        """Make a group that is not connected yet.

        Args:
            rank: this rank in the formation.
            world_size: number of ranks.
            sockets: distinguishes the group's sockets from others.
            hosted: the store, on the rank that hosts it.
            clock: measures waits.
        """
        self._clock = clock
        self.rank = rank
        self.world_size = world_size
        self.waiting: Waiting | None = None
        self.flag = AbortFlag()
        self._sockets = PeerSockets(sockets, before=hosted.sockets_before if hosted else None)
        self._store: Any = hosted.store if hosted else None
        self._lock = threading.Lock()
        self._cut = ""
        self._backend = ""
        self._gloo_address = ""
        self._mesh: Mesh | None = None
        self._gradients: Any = None
        self._aborts: list[threading.Thread] = []
        self._owners: dict[tuple[int, ...], Any] = {}
        self._script: Any = None
        self._member: MemberGroup | None = None
        self.is_open = False
        self.script_exchanges = 0
        self.summed_bytes = 0

    # -- life --------------------------------------------------------------------------------------------------------

    def build(
        self, *, connect: Callable[[], Any], backend: str, own_address: str | None, credentials: Credentials,
        levels: Levels | None = None,
    ) -> None:  # fmt: skip
        """Connect to all other ranks.

        Args:
            connect: connects to the store, where this rank does not host it.
            backend: ``gloo`` or ``nccl`` for the gradients.
            own_address: address of this rank, which determines the interface for gloo; ``None`` leaves it to gloo.
            credentials: of the job.
            levels: the islands whose ranks add up their gradients on their own first; ``None`` for none.

        Raises:
            PeerLost: a member was lost meanwhile.
        """
        self._backend = backend
        by_nccl = backend == "nccl" or (levels is not None and levels.inner == "nccl" and levels.island(self.rank))
        self.flag = AbortFlag(is_pinned=bool(by_nccl))
        self._gloo_address = gloo_device_address(own_address)
        if own_address and ":" in own_address:
            os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6")
        elif own_address and (name := interface_of(own_address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        self.check()

        def store() -> Any:
            self._store = self._store or connect()
            if self._cut:  # it came too late to be cut with the rest
                close_store(self._store)
            return self._store

        attempt = Attempt(
            lambda: connect_ranks(
                store,
                rank=self.rank,
                world_size=self.world_size,
                address=own_address,
                backend=backend,
                credentials=credentials,
                levels=levels,
            )
        )
        connections = attempt.result(self.check)
        self._store, self._mesh, self._gradients = connections.store, connections.mesh, connections.gradients
        publish(self, rank=self.rank, world_size=self.world_size)
        if levels is not None and connections.island is not None:
            self._gradients = TwoLevelGroup(
                connections.island, connections.gradients, is_nccl=levels.inner == "nccl", is_over=self.is_over
            )
        self._join(self._nccl_groups(), self._sockets.before)
        self.check()

    def _join(self, groups: Sequence[Any], before: frozenset[OpenSocket]) -> None:
        """Complete the connections of NCCL's groups, and count all sockets since ``before`` as this group's.

        Raises:
            PeerLost: a rank was lost meanwhile.
        """
        watched = open_sockets()
        self.waiting = Waiting("the connections of NCCL", self._clock()) if groups else None
        try:
            for group in groups:
                join_nccl(group, self.check)
        finally:
            self.waiting = None
        self._own(before, watched)

    def _own(self, before: frozenset[OpenSocket], watched: frozenset[OpenSocket] | None = None) -> None:
        """Count all sockets that were opened since ``before`` as the group's; the end of a watched one breaks it."""
        self._sockets.own(before, watched, store_port=getattr(self._store, "port", 0))

    def cut(self, reason: str) -> None:
        """Make every operation of this group fail, now and later; safe from any thread."""
        with self._lock:
            first, self._cut = not self._cut, self._cut or reason
        if first:
            self._aborts = abort(self._nccl_groups(), self.flag)
        count = self._sockets.cut()
        if self._mesh is not None:
            self._mesh.cut()
        close_store(self._store)
        if self._member is not None:
            self._member.cut(reason)
        if first:
            _log.info("cut %d connections of the group: %s", count, reason)

    @property
    def is_cut(self) -> bool:
        """Whether the group has been cut."""
        return bool(self._cut)

    def is_over(self) -> bool:
        """Return whether the group has been cut.

        Gloo closes a connection of this process when it broke; the group is then cut here.
        """
        if not self._cut and self._sockets.is_one_closed():
            self.cut("a connection broke")
        return self.is_cut

    def check(self) -> None:
        """Fail early when the group has been cut.

        Raises:
            PeerLost: the group has been cut.
        """
        if self._cut:
            raise PeerLost(self._cut)

    def check_whole(self) -> None:
        """Fail where a sum may be a part.

        Raises:
            PeerLost: a communicator may have been aborted.
        """
        self.check()
        if self.flag.is_up:
            raise PeerLost("the connections inside this rank's member were cut")

    def close(self) -> None:
        """Drop the groups. Waits for their threads, so call it after ``cut`` or after the last operation."""
        if self._mesh is not None:
            self._mesh.close()
        withdraw()
        nccl = self._nccl_groups()
        if isinstance(self._gradients, TwoLevelGroup):
            self._gradients.close()
        if self._member is not None:
            self._member.leave_formation()
        close_store(self._store)
        self._gradients = self._script = self._store = self._member = None
        self._owners.clear()
        if nccl:
            release(nccl, (self._aborts or abort(nccl, self.flag)) if self._cut else [])

    # -- operations --------------------------------------------------------------------------------------------------

    def connect_owners(self, tuples: Sequence[tuple[int, ...]]) -> None:
        """Connect the ranks that hold the same parts of a divided model; every rank calls this at the same point.

        Args:
            tuples: the sets of ranks, each ascending, in the same order on every rank. A set of one rank, or of all
                ranks, needs no connections of its own.

        Raises:
            PeerLost: a rank was lost meanwhile.
            UsageError: as ``owners_to_connect``.
        """
        for owners in owners_to_connect(tuples, self.world_size):
            if self.rank not in owners or owners in self._owners:
                continue
            store, before, name = self._store, open_sockets(), f"owners {owners}"
            make, place = make_group(self._backend, self._gloo_address), owners.index(self.rank)
            attempt = Attempt(partial(make, store, name, rank=place, world_size=len(owners)))
            made = self._owners[owners] = attempt.result(self.check)
            self._join([made] if self._backend == "nccl" else [], before)
            self.check()

    def all_reduce(self, flat: torch.Tensor, owners: tuple[int, ...] | None = None) -> Reduction:
        """Start to sum ``flat`` (one dimension, of the same length and format on every rank) in place.

        Args:
            flat: the numbers.
            owners: the ranks whose numbers are added up, as in ``connect_owners``; ``None`` for all.

        Raises:
            PeerLost: the group is broken.
        """
        gradients = self._gradients if owners is None else self._owners.get(owners, self._gradients)
        # Gloo's thread writes a GPU's sum with ``copy_``, at any time, and torch counts that as a change. The alias
        # has a count of its own, so that the guards against changes by the script do not see it.
        alias = flat.data
        self.summed_bytes += flat.nbytes
        work: Reduction = self._guarded(lambda: gradients.allreduce([alias], c10d.AllreduceOptions()), RuntimeError)
        return work

    @property
    def times_reductions(self) -> bool:
        """Whether ``reduction_s`` knows how long reductions took."""
        return self._backend == "nccl"

    def reduction_s(self, work: Reduction) -> float | None:
        """Return the seconds of a finished reduction by its own clock; ``None`` if that is not known."""
        return length_s(work) if self.times_reductions else None

    def gather(self, data: bytes, purpose: Purpose = Purpose.LIBRARY) -> AllGather:
        """Start to collect the same number of bytes from every rank; ``rows`` holds them after ``wait``.

        Raises:
            PeerLost: the group is broken.
        """
        return self._guarded(lambda: self._require_mesh().gather(data, purpose), OSError)

    def gather_now(self, values: Sequence[float], purpose: Purpose = Purpose.LIBRARY) -> list[list[float]]:
        """Return every rank's values, by rank.

        Raises:
            PeerLost: the group is broken.
        """
        gathering = self.gather(pack_floats(values), purpose)
        self.wait(gathering, "an all-gather of numbers" if purpose is Purpose.LIBRARY else CALLS[purpose])
        return [unpack_floats(row) for row in gathering.rows]

    def broadcast_bytes(self, data: bytes | None, *, size_bytes: int, source: int) -> bytes:
        """Return the ``size_bytes`` bytes of rank ``source``; ``data`` is read on that rank only.

        Raises:
            PeerLost: the group is broken.
        """
        outgoing, incoming, got = {}, {}, bytearray(size_bytes)
        if self.rank == source:
            got[:] = data or b""
            others = (rank for rank in range(self.world_size) if rank != source)
            outgoing = {rank: Payload(size_bytes, [memoryview(got)]) for rank in others}
        else:
            incoming = {source: Payload(size_bytes, [memoryview(got)])}
        self.send_receive(outgoing, incoming, f"a broadcast of rank {source}")
        return bytes(got)

    def send_receive(
        self,
        outgoing: Mapping[int, Payload],
        incoming: Mapping[int, Payload],
        what: str,
        purpose: Purpose = Purpose.LIBRARY,
    ) -> None:
        """Send to some ranks and fill memory from others; every rank calls this at the same point.

        Args:
            outgoing: payload by receiving rank.
            incoming: payload by sending rank, of the size that the sender sends.
            what: name of the operation, for the hang watch.
            purpose: what the exchange is for; the same on every rank.

        Raises:
            PeerLost: the group is broken.
        """
        start = self._require_mesh().send_receive
        self.wait(self._guarded(lambda: start(outgoing=outgoing, incoming=incoming, purpose=purpose), OSError), what)

    def wait(
        self,
        work: Reduction | Exchange,
        what: str = "an exchange between ranks",
        *,
        owners: tuple[int, ...] | None = None,
    ) -> None:
        """Wait for an operation.

        Args:
            work: the operation.
            what: its name for the hang watch.
            owners: the ranks that take part in a reduction; ``None`` for all.

        Raises:
            PeerLost: the group is broken.
        """
        waited: Any = work
        broken: type[Exception] = RuntimeError if isinstance(work, dist.Work | TwoLevelWork) else OSError
        # NCCL needs no bounded wait: its operations can be aborted and wait on the device.
        if isinstance(work, dist.Work) and self._backend != "nccl":
            waited = BoundedWait(work, is_over=self.is_over, belongs_to=self._owners.get(owners or (), self._gradients))
        self.waiting = Waiting(what, self._clock())  # as ``named_wait``, with fewer calls
        try:
            waited.wait()
        except broken as error:
            raise PeerLost(self._cut or short_message(error)) from error
        finally:
            self.waiting = None

    @contextmanager
    def named_wait(self, what: str) -> Iterator[None]:
        """Name what the training thread waits for inside, for the hang watch."""
        self.waiting = Waiting(what, self._clock())
        try:
            yield
        finally:
            self.waiting = None

    def settle(self, works: Sequence[Reduction]) -> None:
        """Wait until reductions of this group, which has been cut, no longer use their buffers.

        With NCCL, the current stream waits for them and the host goes on.
        """
        plain = []
        for work in works:
            if isinstance(work, TwoLevelWork):
                work.settle()
            else:
                plain.append(work)
        if self._backend == "nccl":
            settle_nccl(plain)
        else:
            settle(plain, tuple(self._gradient_groups()))

    def finish_device(self) -> None:
        """Wait until the accelerator has finished all queued work, then check that the group is intact.

        An aborted operation of NCCL looks finished; the optimizer must not run on its incomplete result
        (docs/adr/0034). Gloo's operations have ended when they have been waited for, with an error if they failed.

        Raises:
            PeerLost: the group is broken.
        """
        is_queued = bool(self._nccl_groups()) or (self._member is not None and self._member.is_nccl)
        if is_queued and torch.cuda.is_initialized():
            with self.named_wait("the accelerator, and the reductions queued on it"):
                torch.cuda.current_stream().synchronize()
            self.check()

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
            self.waiting = Waiting(what, self._clock()) if what else None

        self._member = member
        if name:
            member.connect(
                self._store, name, check=self.check, backend=backend, addresses=self._sockets.addresses,
                excluded_ports=self._sockets.excluded_ports, address=self._gloo_address,
            )  # fmt: skip
        member.enter_formation(on_wait, self.is_over, self.flag)  # now: connecting ends earlier connections
        self.check()

    # -- the script's collectives ------------------------------------------------------------------------------------

    def script_call(self, name: str, details: str, start: Callable[[Any], dist.Work]) -> dist.Work:
        """Run one collective of the script on all ranks and return its work, which is complete.

        Args:
            name: function of ``torch.distributed``.
            details: what has to be the same on every rank, such as shapes.
            start: starts it in a process group.

        Raises:
            PeerLost: the group is broken; the step or hook is repeated.
            UsageError: nothing would repeat the call here, or another rank calls something else.
        """
        call = f"torch.distributed.{name}" + (f" ({details})" if details else "")
        self.begin_script_exchange(f"torch.distributed.{name}")
        gathering = self.gather(announcement(call), Purpose.SCRIPT)
        self.wait(gathering, call)
        check_alike(gathering.rows, rank=self.rank, call=call)
        group = self._require_script_group()
        try:
            self.waiting = Waiting(call, self._clock())
            work = start(group)
            bounded(name, work, is_over=self.is_over, belongs_to=group).wait()
        except RuntimeError as error:
            if not self._breaks_soon():
                raise  # the script's own mistake
            raise PeerLost(self._cut or short_message(error)) from error
        finally:
            self.waiting = None
        return work

    def begin_script_exchange(self, name: str) -> None:
        """Note that the script is about to exchange data with the other ranks.

        Raises:
            PeerLost: the group is broken.
            UsageError: nothing would repeat the exchange here if a peer was lost.
        """
        if not self.is_open:
            raise UsageError(f"{name} {NOT_HERE}")
        self.check()
        self.script_exchanges += 1

    def _require_script_group(self) -> Any:
        """Return the gloo group of the script's collectives; every rank makes it at the same call."""
        if self._script is None:
            store, before = self._store, open_sockets()
            make = make_group("gloo", self._gloo_address)
            attempt = Attempt(lambda: make(store, "script", rank=self.rank, world_size=self.world_size))
            backend = attempt.result(self.check)
            self._script = carried_by(backend, store, rank=self.rank, world_size=self.world_size)
            self._own(before)
            self.check()
        return self._script

    def _breaks_soon(self) -> bool:
        """Return whether the group turns out to be broken, after one of gloo's operations has failed."""
        end_s = self._clock() + NEWS_S
        while not self.is_over() and self._clock() < end_s:
            time.sleep(0.005)
        return self.is_cut

    def _gradient_groups(self) -> list[Any]:
        """Return the groups in which gradients are summed."""
        return [group for group in (self._gradients, *self._owners.values()) if group is not None]

    def _nccl_groups(self) -> list[Any]:
        """Return the groups whose operations NCCL runs."""
        if self._backend == "nccl":
            return self._gradient_groups()
        gradients = self._gradients
        return [gradients.inner] if isinstance(gradients, TwoLevelGroup) and gradients.is_nccl else []

    def _require_mesh(self) -> Mesh:
        if self._mesh is None:
            raise PeerLost("the group is closed")
        return self._mesh

    def _guarded(self, start: Callable[[], _Work], broken: type[Exception]) -> _Work:
        """Start an operation that raises ``broken`` when a connection is broken; any other error is the caller's."""
        self.check()
        try:
            return start()
        except broken as error:
            raise PeerLost(self._cut or short_message(error)) from error
