"""Schedules checkpoints, and tells when a slow one should be logged. Pure: times are passed in."""

from __future__ import annotations

import threading

STUCK_S = 60.0
"""A write that takes longer is logged, and again each time its duration has doubled."""
RETRY_FRACTION = 0.1
"""Pause after a failure, as a fraction of the interval."""


class Schedule:
    """This rank's schedule of writes; ``request`` and the ends of writes may come from any thread."""

    def __init__(self, *, every_s: float, now_s: float) -> None:
        """Make the first checkpoint due in ``every_s`` seconds."""
        self._every_s = every_s
        self._due_s = now_s + every_s
        self._requested = threading.Event()
        self._stuck_s = STUCK_S

    def request(self) -> None:
        """Make a checkpoint due at once."""
        self._requested.set()

    def cancel_request(self) -> None:
        """Drop a request, which another rank serves; the interval still counts."""
        self._requested.clear()

    def is_due(self, now_s: float) -> bool:
        """Return whether a checkpoint should be written now."""
        return self._requested.is_set() or now_s >= self._due_s

    def started(self, now_s: float) -> None:
        """Note that a write has started."""
        self._requested.clear()
        self._due_s = now_s + self._every_s
        self._stuck_s = STUCK_S

    def failed(self, now_s: float, *, at_once: bool) -> None:
        """Note that a write failed: the next one is due soon, or ``at_once`` when it will be done differently."""
        self._due_s = now_s if at_once else min(self._due_s, now_s + RETRY_FRACTION * self._every_s)

    def should_warn(self, running_s: float) -> bool:
        """Return whether a write has taken so long that it should be logged now."""
        if running_s <= self._stuck_s:
            return False
        self._stuck_s *= 2
        return True
