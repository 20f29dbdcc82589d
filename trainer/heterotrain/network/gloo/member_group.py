"""The private group of a member whose ranks divide the model among themselves.

FSDP and DTensor know the group by its name and keep the object as long as the process lives. Each formation replaces
torch's default group, and this group does not depend on that one. Only its connections end: when an operation was left
in the middle, the ranks no longer agree on what comes next, so all of them cut their connections and the next
formation makes new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from heterotrain.errors import PeerLost
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.connection_attempt import Attempt, short_message
from heterotrain.network.connection_setup import make_group
from heterotrain.network.gloo.abort import OpenSocket, connected, cut, is_open, open_sockets
from heterotrain.network.gloo.bounded_wait import BoundedWait, ThreadedWait, bounded
from heterotrain.network.gloo.script_group import REFUSED, Collectives, breaks_soon, carried_by, forwarded
from heterotrain.network.nccl import abort, join_nccl, release

NAME = "heterotrain-member"
"""Name under which torch finds the group; a process is in one member."""
Direction = Literal["send", "receive"]
"""Of a message between two ranks of a member."""


class MemberGroup(Collectives):
    """The ranks of one member; see the module's docstring."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        check_open: Callable[[], None] = lambda: None,
        on_received: Callable[[int, float, float], None] = lambda _rank, _size_bytes, _seconds: None,
    ) -> None:
        """Make a group without connections; nothing is exchanged.

        Args:
            rank: this rank's number in the member.
            world_size: number of ranks of the member.
            check_open: called before each operation; may raise where nothing would repeat the operation after a loss.
            on_received: called with the sender, the bytes and the seconds of each message that has arrived over gloo.
                The seconds begin when this rank was ready for it. Messages that arrive at the same time count as one,
                from each of their senders.
        """
        super().__init__(rank, world_size)
        self._check_open = check_open
        self.flag = AbortFlag()
        self._on_received = on_received
        self.leave_formation()
        self._lock = threading.Lock()
        self._cut = "the member's ranks are not connected"
        self._group: Any = None
        self._backend: Any = None
        self._is_nccl = False
        self._aborts: list[threading.Thread] = []
        self._sockets: frozenset[OpenSocket] = frozenset()
        self._addresses: frozenset[str] = frozenset()
        self._excluded_ports: frozenset[int] = frozenset()

    def enter_formation(self, on_wait: Callable[[str], None], is_over: Callable[[], bool], flag: AbortFlag) -> None:
        """Train in a formation.

        Args:
            on_wait: called with the name of an operation before it is waited for, and with an empty text afterwards.
            is_over: returns whether the formation has ended.
            flag: of the formation; raised before an abort.
        """
        self._on_wait, self._is_formation_over, self.flag = on_wait, is_over, flag

    def leave_formation(self) -> None:
        """Train in no formation."""
        self._on_wait, self._is_formation_over = (lambda _what: None), (lambda: False)

    @property
    def group_name(self) -> Any:
        """Name under which torch's functional collectives find the group."""
        return NAME

    def connect(
        self,
        store: Any,
        name: str,
        *,
        check: Callable[[], None],
        backend: str = "gloo",
        addresses: Collection[str] = ("127.0.0.1", "::1"),
        excluded_ports: Collection[int] = (),
        address: str = "",
    ) -> None:
        """Connect to all other ranks of the member; every rank has to call this at the same point.

        Args:
            store: reached by all of them.
            name: the same on all of them; no earlier connections of this store may have used it.
            check: called while waiting; may raise to abandon the attempt.
            backend: ``gloo`` or ``nccl``.
            addresses: IP addresses of the member's ranks.
            excluded_ports: a socket with one of these ports on either side does not belong to the group.
            address: at which gloo listens; empty for that of its interface.

        Raises:
            PeerLost: a rank did not connect.
        """
        self.cut("the member's ranks connect again")
        earlier = [self._backend] if self._is_nccl and self._backend is not None else []
        self._group = self._backend = None
        if earlier:
            release(earlier, self._aborts)
        make = make_group(backend, address)
        before = open_sockets()
        attempt = Attempt(lambda: make(store, name, rank=self.rank(), world_size=self.size()))
        made = attempt.result(check)
        watched = open_sockets()
        if backend == "nccl":
            join_nccl(made, check)
        with self._lock:
            self._addresses = frozenset(addresses)
            self._excluded_ports = frozenset(excluded_ports) | {getattr(store, "port", 0)}
            self._sockets = connected(
                (open_sockets() & watched) - before, addresses=self._addresses, excluded_ports=self._excluded_ports
            )
            self._is_nccl, self._backend, self._cut = backend == "nccl", made, ""
        self._group = made if self._is_nccl else carried_by(made, store, rank=self.rank(), world_size=self.size())
        check()

    @property
    def is_connected(self) -> bool:
        """Whether operations can run: the ranks have connected, and the connections are intact."""
        return not self.is_over()

    @property
    def is_nccl(self) -> bool:
        """Whether operations are queued on an accelerator, where an aborted one looks finished."""
        return self._is_nccl

    def cut(self, reason: str) -> None:
        """Make every operation fail, on all ranks of the member, until they connect again; safe from any thread."""
        with self._lock:
            first, self._cut = not self._cut, self._cut or reason
            sockets, backend = self._sockets, self._backend
        if not first:
            return
        if self._is_nccl:
            self._aborts = abort([backend], self.flag)
        cut(sockets, addresses=self._addresses, excluded_ports=self._excluded_ports)

    def is_over(self) -> bool:
        """Return whether the connections have been cut, here or by another rank, or the formation is over."""
        if not self._cut and not all(map(is_open, self._sockets)):
            self.cut("a connection inside the member broke")  # gloo closes its own side of it
        if not self._cut and self._is_formation_over():  # the other ranks have left the step, whoever told this one
            self.cut("the formation is over")
        return bool(self._cut)

    def collective(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dist.Work:
        """Run one collective; its work is complete, or queued on the accelerator with NCCL.

        Raises:
            PeerLost: another rank of the member is lost or has left the step.
        """
        self._check_open()
        if self._cut or self._group is None:
            raise PeerLost(self._cut)
        self._on_wait(f"{method.strip('_')} inside the member")
        try:
            work: dist.Work = getattr(self._group, method)(*arguments, **options)
            if not self._is_nccl:
                wait = bounded(method, work, is_over=self.is_over, belongs_to=self._group)
                wait.wait()
                if method == "recv" and isinstance(wait, ThreadedWait):
                    (tensor,), sender, *_ = arguments
                    self._on_received(sender, tensor.nbytes, wait.ended_s - wait.began_s)
        except RuntimeError as error:
            if not breaks_soon(self.is_over):
                raise  # the script's own mistake
            raise PeerLost(f"{self._cut}: {short_message(error)}") from error
        finally:
            self._on_wait("")
        return work

    def start(self, direction: Direction, tensor: torch.Tensor, rank: int, tag: int) -> ThreadedWait:
        """Begin to send a tensor in the CPU's memory to a rank of the member, or to receive one; ``finish`` waits.

        Raises:
            PeerLost: the connections are cut.
        """
        method = "recv" if direction == "receive" else direction
        if self._cut or self._group is None:
            raise PeerLost(self._cut)
        try:
            work = getattr(self._group, method)([tensor], rank, tag)
        except RuntimeError as error:
            self.cut("a message inside the member failed")
            raise PeerLost(f"{self._cut}: {short_message(error)}") from error
        return ThreadedWait(work, is_over=self.is_over, belongs_to=self._group)

    def note_received(self, messages: Sequence[tuple[ThreadedWait, int, int]]) -> None:
        """Report messages that have arrived at the same time, each as all of them: they share this rank's link.

        Args:
            messages: the finished wait, the sender and the bytes of each.
        """
        if messages:
            seconds = max(wait.ended_s for wait, *_ in messages) - min(wait.began_s for wait, *_ in messages)
            size_bytes = sum(size for *_, size in messages)
            for _, sender, _ in messages:
                self._on_received(sender, size_bytes, seconds)

    def finish(self, direction: Direction, wait: BoundedWait) -> None:
        """Wait until a message has left, or has arrived.

        Raises:
            PeerLost: the other side, or another rank of the member, is lost or has left the step.
        """
        self._on_wait(f"{direction} inside the member")
        try:
            wait.wait()
        except RuntimeError as error:
            self.cut("a message inside the member failed")
            raise PeerLost(f"{self._cut}: {short_message(error)}") from error
        finally:
            self._on_wait("")


for _name in REFUSED:  # messages between two ranks: the ranks of a member stay the same
    setattr(MemberGroup, _name, forwarded(_name))


def backend_for(device: torch.device, *, ranks: int) -> str:
    """Return the backend of a member whose ranks each have a device of this kind on one host."""
    own_devices = device.type == "cuda" and dist.is_nccl_available() and torch.cuda.device_count() >= ranks
    return "nccl" if own_devices else "gloo"
