"""A bound of the requests to the API server, besides the server's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

Sleep = Callable[[float], Awaitable[None]]


class RequestRate:
    """Lets so many requests pass each second, 0 for any number; those of one second may pass at once."""

    def __init__(
        self, per_s: float, *, clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._gap_s = 1 / per_s if per_s else 0.0
        self._clock, self._sleep = clock, sleep
        self._turn_s = clock()

    async def turn(self) -> None:
        """Wait for the turn of one request."""
        now_s = self._clock()
        self._turn_s = max(self._turn_s, now_s - 1.0) + self._gap_s
        if self._turn_s > now_s:
            await self._sleep(self._turn_s - now_s)
