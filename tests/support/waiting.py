"""Waiting for a condition in tests, with a limit on the clock of patience and a message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from support import patience

UNLIMITED_S: Final = 3600.0
"""For limits in real time that no test is to reach: pytest's own, on the clock of patience, ends one that hangs."""


def wait_until(
    condition: Callable[[], bool],
    what: str,
    *,
    timeout_s: float,
    every_s: float = 0.01,
    evidence: Callable[[], str] = str,
    clock: Callable[[], float] = patience.now_s,
) -> None:
    """Block until a condition holds; ``what`` and the ``evidence`` explain a failure, ``clock`` measures the limit.

    Raises:
        AssertionError: the condition does not hold in time.
    """
    end_s = clock() + timeout_s
    while not condition():
        if clock() > end_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}\n{evidence()}")
        time.sleep(every_s)


async def until(probe: Callable[[], Any], what: str, *, timeout_s: float = 90.0, every_s: float = 0.1) -> Any:
    """Return the first true answer of a probe, which may be asynchronous.

    The limit is on the clock of patience, or on that of an event loop in virtual time.

    Raises:
        AssertionError: there is none in time.
    """
    loop = asyncio.get_running_loop()
    clock = loop.time if getattr(loop, "looptime_on", False) else patience.now_s
    end_s = clock() + timeout_s
    while True:
        answer = probe()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer
        assert clock() < end_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(every_s)
