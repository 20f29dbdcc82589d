"""Long work on the event loop in short pieces, so that passes, watches and the renewal of the Lease get their turns."""

from __future__ import annotations

import asyncio
import time

PIECE_S = 0.01
"""Seconds of work after which the event loop is handed over."""


class Turns:
    """Hands the event loop over whenever a piece of work has taken ``PIECE_S``."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def give(self) -> None:
        """Hand the loop over if the present piece is long enough; call this between small steps of the work."""
        if time.perf_counter() - self._since_s >= PIECE_S:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
