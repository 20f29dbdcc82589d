"""The operator's clocks as one value, so that a test replaces all of them in one place, and time without progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from heterotrain_operator.kube.server_clock import ServerClock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time of this process and time of day.

    Attributes:
        monotonic: seconds that never go back, for durations.
        wall: seconds since the epoch, for timestamps: by the API server, whose timestamps they are compared with.
        skew_s: seconds by which this machine's clock is ahead of ``wall``.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    skew_s: Callable[[], float] = lambda: 0.0

    @property
    def processor(self) -> Callable[[], float]:
        """Seconds of processor time of the calling thread, for budgets of computation; ``monotonic`` if replaced.

        By the clock, work takes the longer the more others want the processor. A budget by the clock would then shrink.
        """
        return time.thread_time if self.monotonic is time.monotonic else self.monotonic

    def timed(self, call: Callable[[], T]) -> tuple[T, float]:
        """Return what a call returns, and the seconds of processor time that it took in this thread."""
        began_s = self.processor()
        return call(), self.processor() - began_s

    @classmethod
    def by(cls, server: ServerClock) -> Clocks:
        """Return clocks whose time of day is the API server's."""
        return cls(wall=server.now_s, skew_s=server.skew_s)


class BusyTime:
    """Seconds since a task's last progress, 0 while it rests: the health probe reports a task that hangs.

    Args:
        monotonic: seconds that never go back.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since_s: float | None = None

    def progress(self) -> None:
        """Note the begin of work, or a part of it that is done."""
        self._since_s = self._monotonic()

    def rest(self) -> None:
        """Note that all work is done."""
        self._since_s = None

    @property
    def seconds(self) -> float:
        """Seconds since the last progress; 0 at rest."""
        return 0.0 if self._since_s is None else self._monotonic() - self._since_s
