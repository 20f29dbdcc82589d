"""Measures the links to other workers of this rank's member by the messages of the steps themselves.

Gloo moves a message only when its receiver is ready. So the seconds from then until it has arrived are those of the
link, if the sender was ready before. A stage receives a tensor right after its header, so its sender always is. Ranks
that divide units send to each other at the same points, and the one that comes last finds the others ready. In all
other cases the seconds are too many, never too few. So the fastest messages count, of a limited number of newest ones,
because links change.

Messages of one worker's ranks do not leave it and are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SMALL_BYTES = 4096
"""Messages up to this size show the latency."""
LARGE_BYTES = 65_536
"""Messages from this size on show the bandwidth."""
KEPT = 256
"""The fastest of this many newest messages counts, and of up to as many more."""


@dataclass(slots=True)
class _Fastest:
    """The least of the newest values: of a complete run of ``KEPT`` and of the one that has begun."""

    before: float | None = None
    now: float | None = None
    count: int = 0

    def take(self, value: float) -> None:
        self.now = value if self.now is None else min(self.now, value)
        self.count += 1
        if self.count >= KEPT:
            self.before, self.now, self.count = self.now, None, 0

    @property
    def least(self) -> float | None:
        found = [value for value in (self.before, self.now) if value is not None]
        return min(found, default=None)


@dataclass(slots=True)
class LinkSpeeds:
    """The links of this rank, by the pool at their other end."""

    _pools: Mapping[int, str] = field(default_factory=dict)
    _latency_s: dict[str, _Fastest] = field(default_factory=dict)
    _byte_s: dict[str, _Fastest] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def form(self, pools: Mapping[int, str]) -> None:
        """Measure another member from now on.

        Args:
            pools: of the ranks on other workers, by their number in the member. Links to other pools are
                forgotten.
        """
        with self._lock:
            self._pools = dict(pools)
            for known in (self._latency_s, self._byte_s):
                for pool in known.keys() - set(pools.values()):
                    del known[pool]

    def received(self, rank: int, size_bytes: float, seconds: float) -> None:
        """Count a message from a rank of the member."""
        pool = self._pools.get(rank)
        if pool is None or seconds <= 0 or SMALL_BYTES < size_bytes < LARGE_BYTES:
            return
        with self._lock:
            if size_bytes <= SMALL_BYTES:
                self._latency_s.setdefault(pool, _Fastest()).take(seconds)
            else:
                self._byte_s.setdefault(pool, _Fastest()).take(seconds / size_bytes)

    def links(self) -> Sequence[tuple[str, float | None, float | None]]:
        """Return pool, bytes per second and seconds of a small message, each ``None`` while it is not known."""
        with self._lock:
            found = []
            for pool in sorted(self._latency_s.keys() | self._byte_s.keys()):
                latency, byte = self._latency_s.get(pool), self._byte_s.get(pool)
                byte_s = byte.least if byte is not None else None
                found.append((pool, 1 / byte_s if byte_s else None, latency.least if latency is not None else None))
            return found
