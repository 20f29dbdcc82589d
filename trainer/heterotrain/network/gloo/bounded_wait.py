"""Bounded waits for gloo's operations, which may never end by themselves.

When a connection breaks while gloo's own thread answers a peer on it, gloo does not report the failure: at that moment
the operation is on none of its lists, so a wait for it lasts until its time-out. This happens to survivors that cut
their connections in the middle of an exchange, and to a process that was frozen and resumes after its formation has
ended. So every wait here checks the group regularly. Once the group is cut, an operation gets a short time to end by
itself and is then abandoned, with its group's threads and descriptors. Gloo ends it at its own time-out; what it held
is then released, so that a process that outlives many formations does not grow.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from heterotrain.network.threads import run_beside

MESSAGES = ("send", "recv", "recv_anysource")
"""Operations of one pair of ranks: gloo closes the connection when a wait for one reaches its limit."""
UNLIMITED = "reduce_scatter"
"""In the names of operations whose wait ignores its limit: PyTorch builds them from a sum and waits for that."""

_ABANDONED: list[BoundedWait] = []
"""Operations that gloo may still run."""
_ABANDONING = threading.Lock()
"""For ``_ABANDONED``: more than one thread waits for operations."""

LOOK_S = 0.25
"""Time between two checks of the group; gloo reports an error within milliseconds or never."""


class BoundedWait:
    """A gloo operation with the ``wait`` of torch's operations.

    Attributes:
        is_done: whether no further wait is needed.
    """

    def __init__(self, work: dist.Work, *, is_over: Callable[[], bool], belongs_to: Any) -> None:
        """Wrap an operation.

        Args:
            work: the running operation.
            is_over: returns whether its group has been cut.
            belongs_to: its group.
        """
        self.is_done = False
        self._work = work
        self._is_over = is_over
        self._group = belongs_to

    def wait(self, *, known_over: bool = False) -> None:
        """Return when the operation is done; ``known_over`` when the group was cut some time ago.

        Raises:
            RuntimeError: the operation failed, or the group was cut and gloo did not report how the operation ended.
        """
        release_abandoned()
        was_over = known_over
        while not self.is_done:
            try:
                self.is_done = self._look()
            except RuntimeError:
                self.is_done = True
                raise
            if not self.is_done and was_over:
                self._leave_behind()
                raise RuntimeError("the connection broke, and gloo did not report how an operation ended")
            was_over = self._is_over() if not self.is_done else was_over

    def _look(self) -> bool:
        """Wait for at most ``LOOK_S``; return whether the operation is done, or raise its error."""
        try:
            self._work.wait(timedelta(seconds=LOOK_S))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # raises its error; it may also have succeeded just at the time-out
        return True

    def _leave_behind(self) -> None:
        """Abandon the operation.

        Until it has ended, the group must not be destroyed, not even when the interpreter exits: that would wait, too.
        """
        self.is_done = True
        self._is_over = lambda: True  # may hold the whole formation
        for kept in self.kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        with _ABANDONING:
            _ABANDONED.append(self)

    @property
    def kept(self) -> tuple[Any, Any]:
        """The operation and its group."""
        return self._work, self._group

    def has_ended(self) -> bool:
        """Return whether gloo no longer runs the operation."""
        return bool(self._work.is_completed())


def release_abandoned() -> None:
    """Let go of the abandoned operations that have ended meanwhile; a group goes with its last one."""
    with _ABANDONING:
        ended = [wait for wait in _ABANDONED if wait.has_ended()]
        for wait in ended:
            _ABANDONED.remove(wait)
    for wait in ended:
        for kept in wait.kept:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept))


class ThreadedWait(BoundedWait):
    """The same for operations whose own wait cannot be limited: a thread waits for them without a limit.

    Attributes:
        began_s, ended_s: by ``time.perf_counter``, when the wait was made and when the operation had ended.
    """

    def __init__(self, work: dist.Work, *, is_over: Callable[[], bool], belongs_to: Any) -> None:
        """Wrap an operation; see ``BoundedWait``.

        Raises:
            UsageError: no thread can be started.
        """
        super().__init__(work, is_over=is_over, belongs_to=belongs_to)
        self.began_s = self.ended_s = time.perf_counter()
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        run_beside(self._wait, "heterotrain-wait")

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self.ended_s = time.perf_counter()
        self._ended.set()

    def _look(self) -> bool:
        if self._ended.wait(LOOK_S) and self._error is not None:
            raise self._error
        return self._ended.is_set()

    def has_ended(self) -> bool:
        """Return whether gloo no longer runs the operation; some works of PyTorch never say so themselves."""
        return self._ended.is_set()


def bounded(name: str, work: dist.Work, *, is_over: Callable[[], bool], belongs_to: Any) -> BoundedWait:
    """Return the wait for an operation with this name, a method of process groups or a function of torch.distributed.

    Raises:
        UsageError: no thread can be started.
    """
    kind = ThreadedWait if name in MESSAGES or UNLIMITED in name else BoundedWait
    return kind(work, is_over=is_over, belongs_to=belongs_to)


def settle(works: Sequence[dist.Work], belongs_to: Any) -> None:
    """Wait until operations of a cut group no longer use their buffers; their errors are ignored."""
    for work in works:
        with contextlib.suppress(RuntimeError):
            BoundedWait(work, is_over=lambda: True, belongs_to=belongs_to).wait(known_over=True)
