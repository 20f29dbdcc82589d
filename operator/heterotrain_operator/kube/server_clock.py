"""The API server's time, from the ``Date`` header of its answers.

Deadlines and waits are compared with timestamps of the API server, such as a pod's creation. So the operator takes
"now" from the same clock. Its own clock may be wrong by a day; then it is reported and ends no job.

An answer with the date ``d`` (whole seconds) was made between sending and receiving, so the API server's time minus
the local one lies in ``[d - received, d + 1 - sent]``. The intersection of these intervals gets narrower with each
answer. This is the bound of Cristian (1989), for a server that truncates its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import structlog

SLOWEST_ANSWER_S = 5.0
"""An answer that took longer says too little."""
CONFIRMATIONS = 3
"""A clock that contradicts the known one is believed after this many such answers in a row: one API server of several
may have a wrong clock."""
LONGEST_PAUSE_S = 300.0
"""No answer makes the operator leave a job alone for longer."""
REPORTED_SKEW_S = 30.0
"""A larger difference between the operator's clock and the API server's is logged, and an alert reports it."""

log = structlog.get_logger()


class _Offset(NamedTuple):
    """Bounds of the API server's time minus the local monotonic time, in seconds."""

    low_s: float
    high_s: float

    @property
    def middle_s(self) -> float:
        return (self.low_s + self.high_s) / 2

    def narrowed(self, other: _Offset) -> _Offset | None:
        """Return the intersection; ``None`` if it is empty."""
        both = _Offset(max(self.low_s, other.low_s), min(self.high_s, other.high_s))
        return both if both.low_s <= both.high_s else None


class ServerClock:
    """Time of day by the API server; by this machine's clock until the first answer with a date.

    Args:
        wall: seconds since the epoch by this machine.
        monotonic: seconds that never go back.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._offset: _Offset | None = None
        self._rival: _Offset | None = None
        self._confirmations = 0
        self._reported = False

    def now_s(self) -> float:
        """Return the API server's time, in seconds since the epoch."""
        return self._wall() if self._offset is None else self._monotonic() + self._offset.middle_s

    def skew_s(self) -> float:
        """Return the seconds by which this machine's clock is ahead of the API server's."""
        return self._wall() - self.now_s()

    def begin(self) -> float:
        """Return the time of a request for ``note``."""
        return self._monotonic()

    def note(self, date: str, *, sent_s: float) -> None:
        """Take the date of an answer that was just received; an unreadable one is ignored.

        Args:
            date: the header.
            sent_s: what ``begin`` returned before the request.
        """
        received_s, date_s = self._monotonic(), _seconds(date)
        if date_s is None or received_s - sent_s > SLOWEST_ANSWER_S:
            return
        self._take(_Offset(date_s - received_s, date_s + 1.0 - sent_s))
        self._report()

    def _take(self, found: _Offset) -> None:
        both = found if self._offset is None else self._offset.narrowed(found)
        if both is not None:
            self._offset, self._rival, self._confirmations = both, None, 0
            return
        rival = found if self._rival is None else self._rival.narrowed(found)
        self._confirmations = self._confirmations + 1 if rival is not None else 1
        self._rival = rival or found
        if self._confirmations >= CONFIRMATIONS:
            self._offset, self._rival, self._confirmations = self._rival, None, 0

    def _report(self) -> None:
        skew_s = self.skew_s()
        if (abs(skew_s) > REPORTED_SKEW_S) is self._reported:
            return
        self._reported = not self._reported
        if self._reported:
            log.warning("this machine's clock differs from the API server's: correct it", ahead_s=round(skew_s, 1))
        else:
            log.info("this machine's clock agrees with the API server's again")


def _seconds(date: str) -> float | None:
    try:
        found = parsedate_to_datetime(date)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def retry_after_s(value: str, *, now_s: float) -> float:
    """Return the pause that a ``Retry-After`` header requests, in seconds: a number or a date; else 1.

    Args:
        value: the header; empty without one.
        now_s: the API server's time.
    """
    if value.isascii() and value.isdecimal():
        pause_s = float(int(value[:9]))
    else:
        date_s = _seconds(value)
        pause_s = date_s - now_s if date_s is not None else 1.0
    return max(0.0, min(pause_s, LONGEST_PAUSE_S))
