"""A queue of keys: each is dirty at most once, never handled twice at a time, and backs off by itself.

A key that becomes dirty while it is handled is handled once more afterwards. A failing key waits longer and longer, and
delays nobody else. What is only looked at in case something was missed comes behind what has changed, but does come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
BEHIND_EVERY = 5
"""However much changes, every so manieth key is one of those behind."""

_Key = TypeVar("_Key")


class Queue(Generic[_Key]):
    """Keys to handle.

    Args:
        jitter: returns a factor near 1 for each back-off, so that keys that failed together do not return together.
    """

    def __init__(self, *, jitter: Callable[[], float] = lambda: 1.0) -> None:
        self._jitter = jitter
        self._ready: deque[_Key] = deque()
        self._behind: dict[_Key, None] = {}
        self._handed_out = 0
        self._dirty: set[_Key] = set()
        self._handled: set[_Key] = set()
        self._failures: dict[_Key, int] = {}
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready) + len(self._behind)

    def add(self, key: _Key) -> None:
        """Mark a key dirty, now."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._behind:
            del self._behind[key]
        elif key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._handled:
            self._ready.append(key)
            self._wake.set()

    def add_behind(self, keys: Iterable[_Key]) -> None:
        """Mark keys dirty, to be handled in this order behind all that becomes dirty by itself."""
        for key in keys:
            if key not in self._dirty and key not in self._handled:
                self._dirty.add(key)
                self._behind[key] = None
                self._wake.set()

    def add_after(self, key: _Key, delay_s: float) -> None:
        """Mark a key dirty after a while, unless it becomes so before; the sooner of two such wishes counts."""
        loop = asyncio.get_running_loop()
        when = loop.time() + delay_s
        if (timer := self._timers.get(key)) is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self.add, key)

    async def get(self) -> _Key:
        """Return a dirty key; the caller hands it back with ``done`` or ``failed``."""
        while not len(self):
            self._wake.clear()
            await self._wake.wait()
        self._handed_out += 1
        if self._behind and (not self._ready or self._handed_out % BEHIND_EVERY == 0):
            key = next(iter(self._behind))
            del self._behind[key]
        else:
            key = self._ready.popleft()
        self._dirty.discard(key)
        self._handled.add(key)
        return key

    def done(self, key: _Key) -> None:
        """Hand a key back that was handled."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: _Key, *, at_least_s: float = 0.0) -> float:
        """Hand a key back that has to be tried again; return after how many seconds that will be."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = max(at_least_s, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 30)) * self._jitter())
        self._dirty.discard(key)  # whatever changed meanwhile waits for the back-off, too
        self._release(key)
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: _Key) -> None:
        """Drop what is remembered of a key that will not come back."""
        self._failures.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    def _release(self, key: _Key) -> None:
        self._handled.discard(key)
        if key in self._dirty:
            self._ready.append(key)
            self._wake.set()
