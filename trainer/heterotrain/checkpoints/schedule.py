"""When the next checkpoint is due, and when one takes so long that somebody should be told. No clock: moments come in."""

from __future__ import annotations

import threading

STUCK_S = 60.0
"""A write that takes longer is told; again whenever it has taken twice as long."""
RETRY_FRACTION = 0.1
"""Of the interval: the pause after a failure."""


class Schedule:
    """This rank's view of when to write; ``want`` and the ends of writes may come from any thread."""

    def __init__(self, *, every_s: float, now_s: float) -> None:
        """Be due in ``every_s`` seconds for the first time."""
        self._every_s = every_s
        self._due_s = now_s + every_s
        self._requested = threading.Event()
        self._stuck_s = STUCK_S

    def request(self) -> None:
        """Be due at once."""
        self._requested.set()

    def cancel_request(self) -> None:
        """Be due by the interval only: somebody else does what was wanted."""
        self._requested.clear()

    def is_due(self, now_s: float) -> bool:
        """Return whether a checkpoint should be written now."""
        return self._requested.is_set() or now_s >= self._due_s

    def began(self, now_s: float) -> None:
        """Note that a write has begun."""
        self._requested.clear()
        self._due_s = now_s + self._every_s
        self._stuck_s = STUCK_S

    def failed(self, now_s: float, *, at_once: bool) -> None:
        """Note that a write failed: the next one is due soon, or at once where it is known what to do otherwise."""
        self._due_s = now_s if at_once else min(self._due_s, now_s + RETRY_FRACTION * self._every_s)

    def should_warn(self, running_s: float) -> bool:
        """Return whether a write has taken so long that it is to be told."""
        if running_s <= self._stuck_s:
            return False
        self._stuck_s *= 2
        return True
