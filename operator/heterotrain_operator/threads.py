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
of layouts may keep one each for seconds; reads of telemetry and the learner take turns on the third."""

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Runs what takes long outside the event loop."""

    def __init__(self, computing: Executor) -> None:
        self._computing = computing

    @classmethod
    def few(cls) -> Threads:
        """Return a few threads of this process; each starts when it is needed first."""
        return cls(ThreadPoolExecutor(COMPUTING, thread_name_prefix="computing"))

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call returns, or raise what it raises, from a thread."""
        work = functools.partial(copy_context().run, call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._computing, work)
