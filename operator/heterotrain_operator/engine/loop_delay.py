"""Measures the delay of the event loop: a pass or a read that holds it up delays all jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVERY_S = 0.1


async def watch_delay(observe: Callable[[float], None]) -> None:
    """Report the seconds by which the loop is late, again and again until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        observe(max(0.0, loop.time() - due_s))
