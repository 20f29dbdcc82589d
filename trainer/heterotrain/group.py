"""The process groups of one formation: one for gradients, and a small gloo group of its own for the control vector.

A formation gets fresh groups on a fresh store. ``cut`` may be called from any thread at any time and makes every waiting
operation fail; ``close`` belongs to the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from heterotrain.errors import PeerLost
from heterotrain.sockets import OpenSocket, cut, interface_of, open_sockets

_log = logging.getLogger(__name__)
c10d: Any = dist
"""torch.distributed, whose type information lacks half of what it exports."""

RENDEZVOUS_S = 10.0
"""For the store's keys and connections. Everybody has promised to come, so this only bounds a loss in these milliseconds:
a group that waits for a connection has no socket yet that ``cut`` could shut."""
CONNECT_S = 2.0
COLLECTIVE_S = 1800.0
"""Long on purpose: lost peers are noticed by their links, and a slow rank is no lost rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What ``cut`` needs to tell a group's sockets from all others."""

    members: frozenset[str]
    spare_ports: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStore:
    """A store that this process hosts.

    Attributes:
        store: the store.
        port: where the others find it.
        before: sockets that were open before it: all later ones may belong to the group.
    """

    store: Any
    port: int
    before: frozenset[OpenSocket]


def host_store() -> HostedStore:
    """Start a store on a free port of this host."""
    before = open_sockets()
    store = c10d.TCPStore(
        "localhost", 0, None, is_master=True, timeout=timedelta(seconds=RENDEZVOUS_S), wait_for_workers=False
    )
    return HostedStore(store=store, port=int(store.port), before=before)


def connect_store(host: str, port: int) -> Any:
    """Connect to a store that another rank hosts.

    Raises:
        OSError, RuntimeError: it cannot be reached.
    """
    # torch's own client knocks at a dead host's port until its time-out, and more than once.
    socket.create_connection((host, port), timeout=CONNECT_S).close()
    store = c10d.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    store.set_timeout(timedelta(seconds=RENDEZVOUS_S))
    return store


class Group:
    """The connections of one formation, from this rank's side."""

    def __init__(self, *, rank: int, world_size: int, address: Address, hosted: HostedStore | None = None) -> None:
        """``hosted`` is the store, on the rank that hosts it."""
        self.rank = rank
        self.world_size = world_size
        self._address = address
        self._before = hosted.before if hosted else open_sockets()
        self._store: Any = hosted.store if hosted else None
        self._own: frozenset[OpenSocket] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._cut = ""
        self._backend = ""
        self._control: Any = None

    # -- life --------------------------------------------------------------------------------------------------------

    def build(self, *, connect: Callable[[], Any], backend: str, own_address: str | None) -> None:
        """Connect to everybody.

        Args:
            connect: connects to the store, where this rank does not host it.
            backend: ``gloo`` or ``nccl`` for the gradients.
            own_address: address of this rank, which names the interface for gloo; ``None`` leaves that to gloo.

        Raises:
            PeerLost: a member went away meanwhile.
        """
        self._backend = backend
        if backend == "nccl":
            # Its own watchdog would end the process when a peer is lost; here the links notice, and ``cut`` aborts.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        name = interface_of(own_address) if own_address else None
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        limit = timedelta(seconds=RENDEZVOUS_S)
        try:
            self.check()
            _forget_names()
            self._store = self._store or connect()
            prefixed = c10d.PrefixStore("control", self._store)
            self._control = c10d.ProcessGroupGloo(prefixed, self.rank, self.world_size, limit)
            self.check()
            dist.init_process_group(
                "cuda:nccl,cpu:gloo" if backend == "nccl" else "gloo",
                store=c10d.PrefixStore("gradients", self._store), rank=self.rank, world_size=self.world_size,
                timeout=limit,
            )  # fmt: skip
            long = timedelta(seconds=COLLECTIVE_S)
            self._control._set_default_timeout(long)  # noqa: SLF001 - torch has no public way
            _set_timeout(long)
        except (RuntimeError, ValueError, OSError) as error:
            raise PeerLost(f"the group could not be built: {_sentence(error)}") from error
        with self._lock:
            self._own = open_sockets() - self._before
        self.check()

    def cut(self, reason: str) -> None:
        """Make every operation of this group fail, now and later; safe from any thread."""
        with self._lock:
            first, self._cut = not self._cut, self._cut or reason
            candidates = self._own if self._own is not None else open_sockets() - self._before
        if first and self._backend == "nccl":
            _abort_nccl()
        # The store on this rank's own host is reached through the loopback interface.
        addresses = self._address.members | {"127.0.0.1", "::1"}
        count = cut(candidates, addresses=addresses, spare_ports=self._address.spare_ports)
        if first:
            _log.info("cut %d connections of the group: %s", count, reason)
            if self._own is None:
                threading.Thread(target=self._keep_cutting, name="heterotrain-cut", daemon=True).start()

    def _keep_cutting(self) -> None:
        """While the group is still being built, shut what it opens after it was cut."""
        while self._own is None and not self._closed.wait(0.05):
            self.cut(self._cut)

    @property
    def is_cut(self) -> bool:
        """Whether the group has been cut."""
        return bool(self._cut)

    def check(self) -> None:
        """Fail early when the group has been cut.

        Raises:
            PeerLost: it has.
        """
        if self._cut:
            raise PeerLost(self._cut)

    def close(self) -> None:
        """Drop the groups; waits for their threads, so it comes after ``cut`` or after the last operation."""
        self._closed.set()
        self._control = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group()
        self._store = None

    # -- operations --------------------------------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor) -> dist.Work:
        """Start to sum ``flat`` over all ranks in place.

        Raises:
            PeerLost: the group is broken.
        """
        return self._guarded(lambda: dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True))

    def gather(self, slot_F: torch.Tensor) -> tuple[dist.Work, list[torch.Tensor]]:  # noqa: N803 - shape in the name
        """Start to collect every rank's slot; the list is by rank and filled when the work is done.

        Raises:
            PeerLost: the group is broken.
        """
        slots = [torch.empty_like(slot_F) for _ in range(self.world_size)]
        return self._guarded(lambda: self._control_group().allgather([slots], [slot_F])), slots

    def gather_now(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, by rank.

        Raises:
            PeerLost: the group is broken.
        """
        work, slots = self.gather(torch.tensor(values, dtype=torch.float64))
        self.wait(work)
        return [slot.tolist() for slot in slots]

    def broadcast_bytes(self, data: bytes | None, *, size: int, source: int) -> bytes:
        """Return the bytes that rank ``source`` holds.

        Raises:
            PeerLost: the group is broken.
        """
        buffer = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
        self.broadcast(buffer, source=source)
        return buffer.numpy().tobytes()

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite a contiguous CPU tensor by that of rank ``source``.

        Raises:
            PeerLost: the group is broken.
        """
        options = c10d.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        self.wait(self._guarded(lambda: self._control_group().broadcast([tensor], options)))

    def send(self, tensor: torch.Tensor, *, to: int) -> dist.Work:
        """Start to send a contiguous CPU tensor.

        Raises:
            PeerLost: the group is broken.
        """
        return self._guarded(lambda: self._control_group().send([tensor], to, 0))

    def receive(self, tensor: torch.Tensor, *, source: int) -> dist.Work:
        """Start to receive into a contiguous CPU tensor.

        Raises:
            PeerLost: the group is broken.
        """
        return self._guarded(lambda: self._control_group().recv([tensor], source, 0))

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation.

        Raises:
            PeerLost: the group is broken.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(self._cut or _sentence(error)) from error

    def finish_device(self) -> None:
        """Wait until the accelerator has done everything that was queued, then look whether the group still stands.

        On CUDA a reduction that was aborted looks done; the optimizer must not run on what it left behind.

        Raises:
            PeerLost: the group is broken.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
            self.check()

    def _control_group(self) -> Any:
        if self._control is None:
            raise PeerLost("the group is closed")
        return self._control

    def _guarded(self, start: Callable[[], Any]) -> dist.Work:
        self.check()
        try:
            work: dist.Work = start()
        except RuntimeError as error:
            raise PeerLost(self._cut or _sentence(error)) from error
        return work


def _set_timeout(limit: timedelta) -> None:
    """Set the default group's time-out, by torch's newer or older name for it."""
    newer = getattr(c10d, "set_timeout", None)
    if newer is not None:
        newer(limit)
    else:
        c10d.distributed_c10d._set_pg_timeout(limit)  # noqa: SLF001 - all there is before torch 2.15


def _forget_names() -> None:
    """Let torch count its groups from 0 again.

    The count is part of the keys in the store, and a build that failed leaves it ahead of the other ranks' counts.
    """
    world = getattr(c10d.distributed_c10d, "_world", None)
    if world is not None and not dist.is_initialized():
        world.group_count = 0


def _sentence(error: BaseException) -> str:
    """Return what the library's message says, without where in its source it says so and without its advice."""
    text = str(error).partition("\n")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", text).partition(". This is typically")[0]


def _abort_nccl() -> None:
    """Abort the gradients' communicator: unlike gloo, NCCL can be, from any thread."""
    with contextlib.suppress(Exception):  # whatever it says, the group is over
        c10d.group.WORLD._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 - torch has no public way


def settle(works: Sequence[dist.Work]) -> None:
    """Wait until operations of a cut group have let go of their buffers; their errors are of no interest."""
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
