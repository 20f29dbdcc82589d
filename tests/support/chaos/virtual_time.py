"""An event loop whose time jumps to the next timer: an hour of waiting takes no time, and each run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class DeadlockError(Exception):
    """Every task waits for something that no timer brings."""


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: it advances the time of its loop instead."""

    skip: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise DeadlockError("every task waits, and there is no timer")
        if not ready and timeout:
            self.skip(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        selector = _JumpingSelector()
        selector.skip = self._skip
        super().__init__(selector)
        self._clock_resolution = 1e-6  # sums of floats may miss a timer by less than this

    def _skip(self, seconds: float) -> None:
        self._virtual_s += seconds

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._virtual_s


def run_virtual(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
