"""The threads that compute beside the event loop, as one value, so that a test decides when each of them works."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

COMPUTING = 3
"""Threads that compute: each makes the loop wait for the interpreter that much longer. The allocation and the planner
of layouts may keep one each for seconds; telemetry and shares take turns on the third."""

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Runs what takes long outside the event loop.

    Args:
        computing: does most of it.
        urgent: does what must not wait for that.
    """

    def __init__(self, computing: Executor, urgent: Executor) -> None:
        self._computing = computing
        self._urgent = urgent

    @classmethod
    def few(cls) -> Threads:
        """Return a few threads of this process; each starts when it is needed first."""
        computing = ThreadPoolExecutor(COMPUTING, thread_name_prefix="computing")
        return cls(computing, ThreadPoolExecutor(1, thread_name_prefix="urgent"))

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call returns, or raise what it raises, from a thread."""
        return await self._run(self._computing, functools.partial(call, *args, **kwargs))

    async def run_urgently(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same while the other threads may be busy for seconds."""
        return await self._run(self._urgent, functools.partial(call, *args, **kwargs))

    @staticmethod
    async def _run(executor: Executor, call: Callable[[], T]) -> T:
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(executor, context.run, call)
