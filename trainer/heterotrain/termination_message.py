"""The termination message of a rank: how it ended, in a file that the kubelet or the launcher reads."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from heterotrain_core.contract.outcome import Ending, Outcome, encode_outcome


class TerminationMessage:
    """Writes one outcome; after the first one, later ones are ignored.

    Attributes:
        on_failure: called with the reason when the script ends with an exception. The interpreter may live on for long
            after that, for example because a thread of the script does not end.
    """

    def __init__(
        self,
        path: str | None,
        *,
        where: Callable[[], tuple[int, int]],
        metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._path = Path(path) if path else None
        self._where = where
        self._metrics = metrics
        self.on_failure: Callable[[str], None] = lambda _reason: None
        self._lock = threading.Lock()
        self.outcome: Outcome | None = None

    def install(self) -> None:
        """Write a failure when the script ends with an exception, or ends before training is complete."""
        previous = sys.excepthook

        def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            reason = f"{kind.__name__}: {error}"
            self.write(Ending.FAILED, reason)
            with contextlib.suppress(Exception):  # the script's own error is the one to show
                self.on_failure(reason)
            previous(kind, error, trace)

        sys.excepthook = on_exception
        atexit.register(
            self.write,
            Ending.FAILED,
            "the script ended before every epoch was committed: call job.finish(reason) to end early on purpose",
        )

    def write(self, ending: Ending, reason: str, *, told: bool = False) -> None:
        """Write the outcome unless one was written before; ``told`` when SIGTERM came."""
        with self._lock:
            if self.outcome is not None:
                return
            epoch, step = self._where()
            self.outcome = Outcome(
                ending=ending, reason=reason, epoch=epoch, step=step, metrics=self._metrics(), told=told
            )
            if self._path is not None:
                with contextlib.suppress(OSError):  # a read-only file: the exit code still tells success from failure
                    self._path.write_text(encode_outcome(self.outcome), encoding="utf-8")
