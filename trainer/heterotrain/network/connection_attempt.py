"""An attempt to connect, in a thread that can be left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from heterotrain.errors import PeerLost
from heterotrain.network.threads import check_room, start_thread

_T = TypeVar("_T")


class Attempt(Generic[_T]):
    """One attempt to connect, in a thread of its own, on the same accelerator as the caller's."""

    def __init__(self, make: Callable[[], _T]) -> None:
        """Start ``make``, which returns what the training thread waits for.

        Raises:
            UsageError: there is no room for the threads that connections need.
        """
        check_room()
        self._make = make
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._done = threading.Event()
        self._made: list[_T] = []
        self._error: Exception | None = None
        start_thread(self._run, "heterotrain-connect")

    def result(self, check: Callable[[], None]) -> _T:
        """Return the result; ``check`` is called while waiting and may raise to abandon the attempt.

        Raises:
            PeerLost: a rank did not connect.
        """
        while not self._done.wait(0.01):
            check()
        if not self._made:
            raise PeerLost(f"the group could not be built: {short_message(self._error)}") from self._error
        return self._made[0]

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # each thread has its own current device, at first the first one
            self._made.append(self._make())
        except Exception as error:  # noqa: BLE001  # whatever it is, the training thread gets it
            self._error = error
        self._done.set()


def short_message(error: BaseException | None) -> str:
    """Return the first sentence of a library's error message, without source position and advice."""
    text = str(error).partition("\n")[0]
    place, bracket, rest = text.partition("] ")
    if bracket and place.startswith("[") and ".cc:" in place:
        text = rest
    return text.partition(". This is typically")[0]
