"""Limits in an event loop that is measured with a clock."""

from __future__ import annotations

import asyncio
import time

import pytest
from heterotrain.clock import ClockLoop


def test_a_limit_in_the_loop_counts_by_the_clock() -> None:
    now_s = 1000.0
    loop = ClockLoop(lambda: now_s)

    async def waits() -> None:
        nonlocal now_s
        never = asyncio.Event()
        wait = asyncio.ensure_future(asyncio.wait_for(never.wait(), 0.02))
        await asyncio.to_thread(time.sleep, 0.1)
        assert not wait.done()  # real time has passed, the clock stands still
        now_s += 0.03
        with pytest.raises(TimeoutError):
            await wait

    try:
        loop.run_until_complete(waits())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
