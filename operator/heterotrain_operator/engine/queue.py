"""A work queue of keys in one order: urgent keys first, then changed ones, then routine looks.

As in client-go, a key is dirty (queued) at most once and never processed twice at a time: a key that becomes dirty
during its processing is processed once more afterwards. A failing key waits longer each time and delays no other.
Urgent keys come first: training waits for their pass, or a node is about to end. Routine keys have no known change, or
no more than new telemetry. Some workers take urgent keys only, so that these wait for no pass over others. And every
``FAIR_EVERY``-th key is the one that waits longest, so that none is starved by jobs that change all the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Generic, TypeVar

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
FAIR_EVERY = 4

_Key = TypeVar("_Key")


class Priority(StrEnum):
    """Why a key is dirty, the most urgent reason first; values are labels of a metric."""

    URGENT = "urgent"
    CHANGED = "changed"
    ROUTINE = "routine"


_ORDER = tuple(Priority)


class Queue(Generic[_Key]):
    """Keys to process.

    Args:
        jitter: returns a factor near 1 for each back-off, so that keys that failed together return apart.
        waited: is told the priority with which a key was taken, and the seconds since it could have been taken.
        monotonic: seconds that never go back.
    """

    def __init__(
        self,
        *,
        jitter: Callable[[], float] = lambda: 1.0,
        waited: Callable[[Priority, float], None] = lambda _priority, _seconds: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jitter = jitter
        self._waited = waited
        self._monotonic = monotonic
        self._ready: dict[Priority, dict[_Key, float]] = {priority: {} for priority in Priority}
        """Dirty keys that nobody processes, in order, with the time since which they could be taken."""
        self._processing: dict[_Key, Priority] = {}
        self._again: dict[_Key, Priority] = {}
        """Keys in processing that have become dirty meanwhile."""
        self._served = 0
        self._failures: dict[_Key, int] = {}
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._routine_timers: dict[_Key, asyncio.TimerHandle] = {}
        self._urgent_later: set[_Key] = set()
        """Keys that wait after an urgent pass has failed: whatever makes them dirty makes them urgent."""
        self._wake = asyncio.Event()
        self._wake_urgent = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def add(self, key: _Key) -> None:
        """Mark a key dirty at once; one whose urgent pass has failed is urgent still."""
        urgent = key in self._urgent_later
        self._cancel_timer(key)
        self._put(key, Priority.URGENT if urgent else Priority.CHANGED)

    def add_urgent(self, key: _Key) -> None:
        """Mark a key dirty at once: it is processed before keys that are not urgent."""
        self._cancel_timer(key)
        self._put(key, Priority.URGENT)

    def add_low_priority(self, keys: Iterable[_Key]) -> None:
        """Mark keys dirty for a routine look, in this order."""
        for key in keys:
            self._put(key, Priority.ROUTINE)

    def add_unless_failing(self, key: _Key) -> None:
        """Mark a key dirty at once, unless it waits after a failure."""
        if key not in self._failures:
            self.add(key)

    def add_news(self, key: _Key) -> None:
        """Mark a key dirty for a routine look, unless it waits after a failure: for news that come all the time.

        A job that waits for its first plan would otherwise wait for a look at the new speeds of all others.
        """
        if key not in self._failures:
            self._put(key, Priority.ROUTINE)

    def add_after(self, key: _Key, delay_s: float, *, urgent: bool = False) -> None:
        """Mark a key dirty after a delay, unless it becomes dirty before.

        Of two delays, the earlier one counts. If one of them is urgent, so is the key.
        """
        if urgent:
            self._urgent_later.add(key)
        loop = asyncio.get_running_loop()
        when = loop.time() + delay_s
        if (timer := self._timers.get(key)) is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self.add, key)

    def add_routine_after(self, key: _Key, delay_s: float) -> None:
        """Mark a key dirty after a delay, as ``add_news`` does; the newest delay counts."""
        self._cancel_routine(key)
        loop = asyncio.get_running_loop()
        self._routine_timers[key] = loop.call_later(delay_s, self._add_routine, key)

    def _add_routine(self, key: _Key) -> None:
        del self._routine_timers[key]
        self.add_news(key)

    async def get(self) -> _Key:
        """Wait for a dirty key and return it; the caller gives it back with ``done`` or ``failed``."""
        while not len(self):
            self._wake.clear()
            await self._wake.wait()
        self._served += 1
        first = [priority for priority in _ORDER if self._ready[priority]]
        if self._served % FAIR_EVERY == 0:  # the first key of each priority is the one that waits longest there
            first.sort(key=lambda priority: next(iter(self._ready[priority].values())))
        return self._take(first[0])

    async def get_urgent(self) -> _Key:
        """Wait for an urgent key and return it, as ``get`` does: for workers that leave all other keys to others."""
        while not self._ready[Priority.URGENT]:
            self._wake_urgent.clear()
            await self._wake_urgent.wait()
        return self._take(Priority.URGENT)

    def is_urgent(self, key: _Key) -> bool:
        """Return whether a key in processing came as an urgent one."""
        return self._processing.get(key) is Priority.URGENT

    def done(self, key: _Key) -> None:
        """Give back a key after success."""
        self._failures.pop(key, None)
        self._processing.pop(key, None)
        if (again := self._again.pop(key, None)) is not None:
            self._put(key, again)

    def failed(self, key: _Key, *, at_least_s: float = 0.0) -> float:
        """Give back a key after a failure; return the seconds until it is dirty again.

        What was urgent is urgent still: the pass of a node that is about to end may have met a conflict.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = max(at_least_s, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 30)) * self._jitter())
        # Changes in the meantime wait for the back-off, too.
        reasons = (self._processing.pop(key, None), self._again.pop(key, None))
        self.add_after(key, delay_s, urgent=Priority.URGENT in reasons)
        return delay_s

    def forget(self, key: _Key) -> None:
        """Drop the failures and delays of a key that no longer exists."""
        self._failures.pop(key, None)
        self._cancel_timer(key)
        self._cancel_routine(key)

    def _put(self, key: _Key, priority: Priority) -> None:
        """Let a key wait with this priority, unless it does already with the same or a more urgent one."""
        if key in self._processing:
            self._again[key] = min(self._again.get(key, priority), priority, key=_ORDER.index)
            return
        before = next((each for each in _ORDER if key in self._ready[each]), None)
        if before is not None:
            if _ORDER.index(before) <= _ORDER.index(priority):
                return
            del self._ready[before][key]
        self._ready[priority][key] = self._monotonic()
        self._wake.set()
        if priority is Priority.URGENT:
            self._wake_urgent.set()

    def _take(self, priority: Priority) -> _Key:
        key = next(iter(self._ready[priority]))
        since_s = self._ready[priority].pop(key)
        self._cancel_routine(key)  # this pass chooses the time of the next one
        self._processing[key] = priority
        self._waited(priority, self._monotonic() - since_s)
        return key

    def _cancel_routine(self, key: _Key) -> None:
        if timer := self._routine_timers.pop(key, None):
            timer.cancel()

    def _cancel_timer(self, key: _Key) -> None:
        self._urgent_later.discard(key)
        if timer := self._timers.pop(key, None):
            timer.cancel()
