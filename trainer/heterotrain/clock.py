"""The clock that limits of waits are measured with; a constructor takes it; the default is the monotonic one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds that never decrease; only differences of two readings mean something."""


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose limits and sleeps are measured with a clock, which may be slower than real time.

    The loop sleeps in real time, looks at the clock, and sleeps again if a limit has not been reached.
    """

    def __init__(self, clock: Clock) -> None:
        """Make a loop that does not run yet."""
        self._clock = clock
        super().__init__()

    def time(self) -> float:
        """Return the clock's seconds."""
        return self._clock()
