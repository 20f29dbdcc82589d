"""A work queue of keys, with a back-off for each key, a high priority for losses and a low one for routine checks.

As in client-go, a key is dirty (queued) at most once and never processed twice at a time: a key that becomes dirty
during its processing is processed once more afterwards. A failing key waits longer each time and delays no other.
Urgent keys come first: training waits for their pass, or a node is about to end. Keys without a known change have low
priority, and so have those with no more than new telemetry: they come after the others. None is starved by others, for
whoever changes jobs makes keys urgent. Some workers take urgent keys only, so that these wait for no pass over others.

Changed keys are in lines that take turns: a thousand new jobs would otherwise each get workers before the first of them
trains, and jobs that train would hold up those that have not begun, and those that wait for each other's nodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from typing import Generic, TypeVar

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
LOW_PRIORITY_EVERY = 5
"""Every fifth key comes from the low-priority keys, however many others there are, so that they are not starved."""

READY_EVERY = 3
"""At least every third of the others is not urgent, however many urgent ones there are."""

_Key = TypeVar("_Key")


class Priority(StrEnum):
    """Why a key is dirty; values are labels of a metric."""

    URGENT = "urgent"
    CHANGED = "changed"
    ROUTINE = "routine"


class QueueLine(IntEnum):
    """Lines of jobs: those in one line wait for each other, and the lines take turns."""

    NEW = 0
    """It has no pods."""
    STARTING = 1
    """It has pods and has not trained yet, as far as this operator knows."""
    TRAINING = 2
    MOVING = 3
    """It trains, and the allocation has just changed its workers. Until its pass, nodes that it gains stand empty, and
    jobs that get its nodes wait."""


class Queue(Generic[_Key]):
    """Keys to process.

    Args:
        jitter: returns a factor near 1 for each back-off, so that keys that failed together return apart.
        waited: is told the priority with which a key was taken, and the seconds since it could have been taken.
        monotonic: seconds that never go back.
        line_of: a number for each line of changed keys; the lines take turns.
    """

    def __init__(
        self,
        *,
        jitter: Callable[[], float] = lambda: 1.0,
        waited: Callable[[Priority, float], None] = lambda _priority, _seconds: None,
        monotonic: Callable[[], float] = time.monotonic,
        line_of: Callable[[_Key], int] = lambda _key: 0,
    ) -> None:
        self._jitter = jitter
        self._line_of = line_of
        self._waited = waited
        self._monotonic = monotonic
        self._urgent: dict[_Key, None] = {}
        """Dirty keys that come first. One that is being processed has to wait for its end."""
        self._changed: dict[_Key, int] = {}
        """Keys of all lines, with their line."""
        self._lines: dict[int, dict[_Key, None]] = {}
        """Keys of each line that is not empty. The line whose turn comes next is the first one."""
        self._chosen_line: dict[_Key, int] = {}
        """Lines that keys enter next, in place of their own."""
        self._low_priority: dict[_Key, None] = {}
        self._served = self._urgent_in_a_row = 0
        self._dirty: set[_Key] = set()
        self._since_s: dict[_Key, float] = {}
        """When each dirty key got its priority, or, for one that was in processing then, when that ended."""
        self._processing: dict[_Key, bool] = {}
        """Keys in processing, and whether they came as urgent ones."""
        self._failures: dict[_Key, int] = {}
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._routine_timers: dict[_Key, asyncio.TimerHandle] = {}
        self._urgent_later: set[_Key] = set()
        """Keys that wait after an urgent pass has failed: whatever makes them dirty makes them urgent."""
        self._wake = asyncio.Event()
        self._wake_urgent = asyncio.Event()

    def __len__(self) -> int:
        return len(self._changed) + len(self._low_priority) + sum(key not in self._processing for key in self._urgent)

    def add(self, key: _Key, *, line: int | None = None) -> None:
        """Mark a key dirty at once; one whose urgent pass has failed is urgent still.

        Args:
            key: the key.
            line: where it waits this time, even if it is in another line already; ``None`` for its own.
        """
        if key in self._urgent_later:
            self.add_urgent(key)
            return
        self._cancel_timer(key)
        if line is not None:
            self._chosen_line[key] = line
        if key in self._low_priority:
            del self._low_priority[key]
        elif key in self._dirty:
            if line is not None and key in self._changed:
                self._leave_line(key)
                self._line_up(key)
            return
        self._dirty.add(key)
        self._count_from_now(key)
        if key not in self._processing:
            self._line_up(key)
            self._wake.set()

    def add_urgent(self, key: _Key) -> None:
        """Mark a key dirty at once: it is processed before keys that are not urgent, but for ``READY_EVERY``."""
        self._cancel_timer(key)
        if key not in self._urgent:
            if key in self._low_priority:
                del self._low_priority[key]
            elif key in self._dirty and key not in self._processing:
                self._leave_line(key)
            self._urgent[key] = None
            self._count_from_now(key)
        self._dirty.add(key)
        if key not in self._processing:
            self._wake_all()

    def add_low_priority(self, keys: Iterable[_Key]) -> None:
        """Mark keys dirty with low priority, in this order."""
        for key in keys:
            if key in self._dirty:
                continue
            self._dirty.add(key)
            self._count_from_now(key)
            if key not in self._processing:  # otherwise it is processed once more after the present time
                self._low_priority[key] = None
                self._wake.set()

    def add_unless_failing(self, key: _Key) -> None:
        """Mark a key dirty at once, unless it waits after a failure."""
        if key not in self._failures:
            self.add(key)

    def add_news(self, key: _Key) -> None:
        """Mark a key dirty with low priority, unless it waits after a failure: for news that come all the time.

        A job that waits for its first plan would otherwise wait for a look at the new speeds of all others.
        """
        if key not in self._failures:
            self.add_low_priority((key,))

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
        """Mark a key dirty with low priority after a delay, as ``add_news`` does; the newest delay counts."""
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
        urgent = self._first_urgent()
        if self._low_priority and ((urgent is None and not self._changed) or self._served % LOW_PRIORITY_EVERY == 0):
            key = next(iter(self._low_priority))
            del self._low_priority[key]
            return self._take(key, Priority.ROUTINE)
        if urgent is None or (self._changed and self._urgent_in_a_row >= READY_EVERY - 1):
            self._urgent_in_a_row = 0
            return self._take(self._first_changed(), Priority.CHANGED)
        self._urgent_in_a_row += 1
        return self._take(urgent, Priority.URGENT)

    async def get_urgent(self) -> _Key:
        """Wait for an urgent key and return it, as ``get`` does: for workers that leave all other keys to others."""
        while (key := self._first_urgent()) is None:
            self._wake_urgent.clear()
            await self._wake_urgent.wait()
        return self._take(key, Priority.URGENT)

    def is_urgent(self, key: _Key) -> bool:
        """Return whether a key in processing came as an urgent one."""
        return self._processing.get(key, False)

    def _first_urgent(self) -> _Key | None:
        return next((key for key in self._urgent if key not in self._processing), None)

    def _first_changed(self) -> _Key:
        """Take the first key of the line whose turn it is out of it; the other lines come next."""
        line, keys = next(iter(self._lines.items()))
        key = next(iter(keys))
        self._leave_line(key)
        if keys:
            self._lines[line] = self._lines.pop(line)
        return key

    def _line_up(self, key: _Key) -> None:
        line = self._chosen_line.pop(key, None)
        line = self._changed[key] = self._line_of(key) if line is None else line
        self._lines.setdefault(line, {})[key] = None

    def _leave_line(self, key: _Key) -> None:
        line = self._changed.pop(key)
        del self._lines[line][key]
        if not self._lines[line]:
            del self._lines[line]

    def _take(self, key: _Key, priority: Priority) -> _Key:
        self._urgent.pop(key, None)
        self._dirty.discard(key)
        self._chosen_line.pop(key, None)
        self._cancel_routine(key)  # this pass chooses the time of the next one
        self._processing[key] = priority is Priority.URGENT
        self._waited(priority, self._monotonic() - self._since_s.pop(key))
        return key

    def done(self, key: _Key) -> None:
        """Give back a key after success."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: _Key, *, at_least_s: float = 0.0) -> float:
        """Give back a key after a failure; return the seconds until it is dirty again.

        What was urgent is urgent still: the pass of a node that is about to end may have met a conflict.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = max(at_least_s, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 30)) * self._jitter())
        self._dirty.discard(key)  # changes in the meantime wait for the back-off, too
        self._since_s.pop(key, None)
        was_urgent = key in self._urgent or self._processing.get(key, False)
        self._urgent.pop(key, None)
        self._release(key)
        self.add_after(key, delay_s, urgent=was_urgent)
        return delay_s

    def forget(self, key: _Key) -> None:
        """Drop the failures and delays of a key that no longer exists."""
        self._failures.pop(key, None)
        self._chosen_line.pop(key, None)
        self._cancel_timer(key)
        self._cancel_routine(key)

    def _cancel_routine(self, key: _Key) -> None:
        if timer := self._routine_timers.pop(key, None):
            timer.cancel()

    def _cancel_timer(self, key: _Key) -> None:
        self._urgent_later.discard(key)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    def _release(self, key: _Key) -> None:
        self._processing.pop(key, None)
        if key in self._dirty:
            self._count_from_now(key)
            if key not in self._urgent:
                self._line_up(key)
            self._wake_all()

    def _count_from_now(self, key: _Key) -> None:
        self._since_s[key] = self._monotonic()

    def _wake_all(self) -> None:
        self._wake.set()
        self._wake_urgent.set()
