"""SIGTERM: the rank leaves after its step, and a handler of the script still runs."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)


class SigtermHandler:
    """Reports SIGTERM to the training, then calls the handler that the script had installed.

    Attributes:
        trains: whether the training is running. The script's handler then cannot end the process by ``SystemExit``: the
            rank leaves by itself after the step, with its state saved.
    """

    def __init__(self, request: Callable[[], None]) -> None:
        """``request`` is called with each SIGTERM, inside the signal handler."""
        self.trains = True
        self._request = request
        self._scripts: Any = None
        self._handling = False

    def install(self) -> None:
        """Take over SIGTERM, also from a handler that the script has installed since the last call.

        Python accepts signal handlers in the main thread only; in any other thread nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        present = signal.getsignal(signal.SIGTERM)
        if present != self._handle:
            self._scripts = present
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._request()
        if not callable(self._scripts) or self._handling:  # the script's handler may call this one
            return
        self._handling = True
        try:
            self._scripts(number, frame)
        except SystemExit:
            if not self.trains:
                raise
            _log.info("the script's handler of SIGTERM wants to exit: this rank leaves after its step")
        finally:
            self._handling = False
