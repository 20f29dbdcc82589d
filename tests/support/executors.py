"""Executors without threads: one works at once, one when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from heterotrain_operator.threads import Threads


class AtOnce(Executor):
    """Does each piece of work when it is given.

    Attributes:
        working: whether a piece of work is being done.
    """

    working = False

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the finished work."""
        future: Future[Any] = Future()
        self._do(future, lambda: call(*args, **kwargs))
        return future

    def _do(self, future: Future[Any], call: Callable[[], Any]) -> None:
        self.working = True
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  # the caller gets it, as from a thread
            future.set_exception(error)
        finally:
            self.working = False


class ByHand(AtOnce):
    """Does one piece of work for each ``step``, the oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    @property
    def waiting(self) -> int:
        """How many pieces of work wait."""
        return len(self._waiting)

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return work that waits."""
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: call(*args, **kwargs)))
        return future

    def step(self) -> None:
        """Do the oldest piece of work."""
        self._do(*self._waiting.popleft())


def at_once() -> Threads:
    """Return threads whose work is done at once, in the caller's."""
    return Threads(AtOnce())
