"""Sums over all ranks in two levels: inside islands of GPUs, and between islands and all other ranks.

NCCL connects GPUs only, so one rank on a CPU would otherwise take all gradients of a job through the memory of every
host. Here the ranks of an island add up their numbers by NCCL, and the result is with its lowest rank, the island's
head. The heads and the ranks outside islands add up theirs by gloo. Then each head gives the sum to its island. Every
rank ends with the same bits, and each element is the sum of the same W terms as before, in another order.

A head has a thread for the step in between: an operation of gloo may start only when its island's sum is there, and
all operations have to start in the same order on all heads. The way back is part of ``IslandSum.wait``. So the
order of operations in an island is the same on all of its ranks: sums as they are started, ways back as they are
waited for (docs/adr/0036).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from heterotrain.network.gloo.bounded_wait import LOOK_S
from heterotrain.network.sums import GlooSum, Reduction, Sums, operation

_c10d: Any = dist
HEAD = 0
"""The head's rank in its island."""
JOIN_S = 2.0
"""Limit for the end of the head's thread, whose waits notice a cut within ``LOOK_S``."""
CUT = "the group was cut before its sum had left the island"


class IslandSums(Sums):
    """Sums over all ranks, for a rank in an island.

    Attributes:
        inner: the group of the island.
        outer: the group of the heads; ``None`` if this rank is not the head of its island.
        is_over: returns whether the formation has been cut.
    """

    def __init__(self, inner: Any, outer: Any, *, is_nccl: bool, is_over: Callable[[], bool]) -> None:
        """Take over connected groups.

        Args:
            inner: of the island, in which the head is the lowest rank.
            outer: of the heads, over gloo; ``None`` on all other ranks.
            is_nccl: whether ``inner`` is NCCL's.
            is_over: returns whether the formation has been cut.
        """
        self.inner, self.outer = inner, outer
        self._is_nccl = is_nccl
        self.is_over = is_over
        self._lock = threading.Lock()
        self._is_closed = False
        self._queue: queue.SimpleQueue[IslandSum | None] = queue.SimpleQueue()
        self._relay: threading.Thread | None = None

    @property
    def nccl_groups(self) -> list[Any]:
        """The group of the island, if it is NCCL's: its operations are queued in the current stream's order."""
        return [self.inner] if self._is_nccl else []

    def start(self, flat: torch.Tensor) -> IslandSum:
        """Start to add up."""
        if self.outer is not None and self._relay is None:  # by the training thread, whose current device it takes
            device = torch.cuda.current_device() if self._is_nccl else None
            relay = threading.Thread(target=self._run, args=(device,), name="heterotrain-relay", daemon=True)
            relay.start()  # may fail, and then no operation must be on its way
            self._relay = relay
        options = _c10d.ReduceOptions()
        options.rootRank = HEAD
        work = IslandSum(self, flat, self._inside(self.inner.reduce([flat], options)))
        if self.outer is not None:
            self._queue.put(work)
        return work

    def close(self) -> None:
        """End the thread. Call it after a cut, or after the last operation."""
        self._queue.put(None)
        if self._relay is not None:
            self._relay.join(JOIN_S)

    # -- for the works -----------------------------------------------------------------------------------------------

    def give_back(self, flat: torch.Tensor) -> Reduction:
        """Start to give the island its sum from the head.

        Raises:
            RuntimeError: the island's connections are broken.
        """
        options = _c10d.BroadcastOptions()
        options.rootRank = HEAD
        return self._inside(self.inner.broadcast([flat], options))

    def stop(self) -> None:
        """Start nothing between heads any more."""
        with self._lock:
            self._is_closed = True

    def _inside(self, work: Any) -> Reduction:
        return operation(work, self.inner, is_nccl=self._is_nccl, is_over=self.is_over)

    # -- the head's thread -------------------------------------------------------------------------------------------

    def _run(self, device: int | None) -> None:
        with _side_stream(device):
            while (work := self._queue.get()) is not None:
                work.relay(self._pass_on)

    def _pass_on(self, work: IslandSum) -> Reduction:
        work.up.wait()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(CUT)
            across = self.outer.allreduce([work.flat], _c10d.AllreduceOptions())
            return GlooSum(across, is_over=self.is_over, belongs_to=self.outer)


class IslandSum(Reduction):
    """A sum on its way.

    Attributes:
        flat: the numbers.
        up: the sum inside the island.
    """

    def __init__(self, group: IslandSums, flat: torch.Tensor, up: Reduction) -> None:
        """Wrap a sum inside an island that is running."""
        self.flat, self.up = flat, up
        self._group = group
        self._across: Reduction | None = None
        self._down: Reduction | None = None
        self._error: Exception | None = None
        self._is_relayed = threading.Event()
        self._callbacks: list[Callable[[object], object]] = []

    def wait(self) -> None:
        """Give the island its sum, and wait for it; ranks of an island call this in the same order.

        Raises:
            RuntimeError: an operation failed, or the formation was cut.
        """
        if self._down is not None:
            return
        group = self._group
        if group.outer is not None:
            while not self._is_relayed.wait(LOOK_S):
                if group.is_over():
                    raise RuntimeError(CUT)
            if self._error is not None:
                raise self._error
        (self._across or self.up).wait()
        self._down = group.give_back(self.flat)
        self._down.wait()
        for callback in self._callbacks:
            callback(self)

    def settle(self) -> None:
        """Wait until nothing uses the buffer any more; the group has been cut."""
        group = self._group
        group.stop()
        if group.outer is not None:
            self._is_relayed.wait()  # the thread's own waits end after a cut
        for way in (self._across, self.up, self._down):
            if way is not None:
                way.settle()

    def relay(self, start: Callable[[IslandSum], Reduction]) -> None:
        """Take the sum between heads from ``start``, or its error; called by the head's thread."""
        try:
            self._across = start(self)
        except Exception as error:  # noqa: BLE001  # whatever it is, the training thread gets it
            self._error = error
        self._is_relayed.set()

    def get_future(self) -> IslandSum:
        """Return what takes callbacks, as torch's works do."""
        return self

    def add_done_callback(self, callback: Callable[[object], object]) -> None:
        """Call ``callback`` at the end of ``wait``."""
        self._callbacks.append(callback)


@contextlib.contextmanager
def _side_stream(device: int | None) -> Iterator[None]:
    """Let operations of this thread wait for the island's, instead of those that compute; nothing without a device."""
    if device is None:
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
