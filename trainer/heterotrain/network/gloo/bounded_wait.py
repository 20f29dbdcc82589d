"""Operations of gloo whose end is not left to gloo alone.

When a connection breaks while gloo's own thread answers a peer on it, gloo tells nobody: the operation to which the answer
belonged is on none of its lists at that moment, and whoever waits for it waits until its time-out. That happens to survivors
that cut their connections in the middle of an exchange, and to a process that was frozen and wakes among the ruins of its
formation. So nobody here waits without looking up: once the group is cut, an operation gets a short while to end by
itself, and then is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOOK_S = 0.25
"""Between two looks at the group; gloo says what it says within milliseconds."""


class BoundedWait:
    """An operation of gloo's, to be waited for as any other of torch's.

    Attributes:
        is_done: whether nobody has to wait for it any more.
    """

    def __init__(self, work: dist.Work, *, is_over: Callable[[], bool], belongs_to: Any = None) -> None:
        """Watch an operation.

        Args:
            work: the operation, on its way.
            is_over: returns whether its group has been cut.
            belongs_to: its group; torch's default one if none is given.
        """
        self.is_done = False
        self._work = work
        self._is_over = is_over
        self._group = belongs_to

    def wait(self, *, known_over: bool = False) -> None:
        """Return when the operation is done; ``known_over`` where the group was cut a while ago.

        Raises:
            RuntimeError: it failed, or the group is over and nobody says what became of the operation.
        """
        was_over = known_over
        while not self.is_done:
            try:
                self.is_done = self._look()
            except RuntimeError:
                self.is_done = True
                raise
            if not self.is_done and was_over:
                self._leave_behind()
                raise RuntimeError("the connection broke, and gloo did not say what became of an operation")
            was_over = self._is_over() if not self.is_done else was_over

    def _look(self) -> bool:
        """Wait a while; return whether the operation is done, or raise its error."""
        try:
            self._work.wait(timedelta(seconds=LOOK_S))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # raises its error; it may also have come right with the time-out
        return True

    def _leave_behind(self) -> None:
        """Walk away; the group must never be destroyed, not even at the interpreter's end: that would wait as well."""
        self.is_done = True
        group = dist.group.WORLD if self._group is None else self._group
        for thing in (self._work, group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def settle(works: Sequence[dist.Work]) -> None:
    """Wait until operations of a cut group have let go of their buffers; their errors are of no interest."""
    for work in works:
        with contextlib.suppress(RuntimeError):
            BoundedWait(work, is_over=lambda: True).wait(known_over=True)
