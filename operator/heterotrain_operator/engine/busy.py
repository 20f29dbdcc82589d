"""For how long a task has worked without progress: the health probe reports a task that hangs."""

from __future__ import annotations

from collections.abc import Callable


class BusyTime:
    """Seconds since a task's last progress; 0 while it rests.

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
