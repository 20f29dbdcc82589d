"""SIGTERM and SIGINT (Ctrl-C): the rank leaves after its step, and a handler of the script still runs.

SIGTERM is taken from ``heterotrain.init`` on, SIGINT only while ``job.steps`` trains: before and after, Ctrl-C ends a
script as it always does. A second SIGINT ends the process at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)

SAME_S = 1.0
"""SIGINT so soon after the first one is the same: a launcher passes on what the terminal has sent to the rank, too."""


class StopSignals:
    """Reports SIGTERM and SIGINT to the training, then calls the handler that the script had installed."""

    def __init__(
        self, request: Callable[[signal.Signals], None], *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """``request`` is called with each signal, inside the signal handler; ``now_s`` is a clock."""
        self._request = request
        self._now_s = now_s
        self._scripts: dict[int, Any] = {}
        self._trains = True
        self._handling = False
        self._interrupted_s: float | None = None

    def install(self) -> None:
        """Take over SIGTERM, also from a handler that the script has installed since the last call.

        Python accepts signal handlers in the main thread only; in any other thread nothing changes.
        """
        self._take(signal.SIGTERM)

    def begin(self) -> None:
        """Take over both signals, because the training begins. A process that ignores SIGINT goes on to do so."""
        self._trains, self._interrupted_s = True, None
        self._take(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._take(signal.SIGINT)

    def end(self) -> None:
        """Give SIGINT back to the script, and let its handler of SIGTERM end the process: the training is over."""
        self._trains = False
        if _is_main_thread() and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._scripts[signal.SIGINT])

    def _take(self, number: signal.Signals) -> None:
        present = signal.getsignal(number)
        if _is_main_thread() and present is not None and present != self._handle:  # None: a handler of C code
            self._scripts[number] = present
            signal.signal(number, self._handle)

    def _handle(self, given: int, frame: FrameType | None) -> None:
        number = signal.Signals(given)
        if number is signal.SIGINT:
            self._interrupted()
        self._request(number)
        scripts = self._scripts.get(number)
        if not callable(scripts) or scripts is signal.default_int_handler:
            return
        if self._handling:  # the script's handler may call this one
            return
        self._handling = True
        try:
            scripts(number, frame)
        except (SystemExit, KeyboardInterrupt):
            if not self._trains:
                raise
            _log.info("the script's handler of %s wants to exit: this rank leaves after its step", number.name)
        finally:
            self._handling = False

    def _interrupted(self) -> None:
        """Say what the first SIGINT does; end the process at the next one."""
        now_s = self._now_s()
        if self._interrupted_s is None:
            self._interrupted_s = now_s
            with contextlib.suppress(RuntimeError):  # the handler may have interrupted another line of the log
                _log.warning("SIGINT: the training ends after this step; once more ends it at once, with nothing saved")
        elif now_s - self._interrupted_s >= SAME_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
