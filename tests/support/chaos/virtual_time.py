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
    """An event loop in virtual time; work for other threads runs at once, because threads would not be repeatable."""

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

    def run_in_executor(self, _executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # a future instead of a thread's
        """Call the function at once and return its result as a future."""
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  # the caller gets it, as from a thread
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
