"""Keeps the event loop responsive while threads compute and long work is done on it, and measures its delay.

A thread that computes hands the interpreter over only after the switch interval, and the loop asks for it after each
system call. A full collection of cyclic garbage stops all threads for as long as it takes to visit every object: half
a second for a thousand jobs. Nearly all of these objects live long and are freed by their reference counts. So what
has survived one collection is left out of the following ones, and only rarely is everything visited.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable

SWITCH_S = 0.001
"""Longest time for which a computing thread keeps the interpreter, in seconds; Python's own value is 0.005."""
SHORT_EVERY_S = 1.0
"""Pause between collections of what is new: with little that is new, each takes milliseconds."""
THRESHOLDS = (10_000, 20, 1_000_000)
"""New objects before a collection of the youngest, and such collections before one of older objects. In between, Python
itself never collects everything."""
WHOLE_EVERY_S = 3600.0
"""Pause between collections of everything, which bound what cyclic garbage can add up to."""
EVERY_S = 0.1
PIECE_S = 0.01
"""Seconds of work after which the event loop is handed over."""


def collect_new() -> None:
    """Collect garbage among the objects that are newer than the last call, and leave out the rest from now on."""
    gc.collect()
    gc.freeze()


def collect_all() -> None:
    """Collect garbage among all objects."""
    gc.unfreeze()
    collect_new()


async def keep_responsive() -> None:
    """Set the switch interval, and collect garbage in short pieces until cancelled.

    The interpreter's own settings are then restored.
    """
    loop, switch_s, thresholds = asyncio.get_running_loop(), sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*THRESHOLDS)
    whole_s = loop.time()
    try:
        while True:
            if loop.time() >= whole_s:
                collect_all()
                whole_s = loop.time() + WHOLE_EVERY_S
            else:
                collect_new()
            await asyncio.sleep(SHORT_EVERY_S)
    finally:
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def watch_delay(observe: Callable[[float], None]) -> None:
    """Report the seconds by which the loop is late, until cancelled: a pass that holds it up delays all jobs."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        observe(max(0.0, loop.time() - due_s))


class Turns:
    """Hands the event loop over whenever a piece of work has taken ``PIECE_S``.

    So passes, watches and the renewal of the Lease get their turns during long work.
    """

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def give(self) -> None:
        """Hand the loop over if the present piece is long enough; call this between small steps of the work."""
        if time.perf_counter() - self._since_s >= PIECE_S:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
