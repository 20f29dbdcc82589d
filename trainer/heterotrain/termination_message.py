"""The termination message of a rank: how it ended, in a file that the kubelet or the launcher reads."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from heterotrain_core.contract.outcome import Cause, Ending, Outcome, encode_outcome
from heterotrain_core.uris import redacted

from heterotrain.errors import OUT_OF_MEMORY_SIGNS, HeterotrainError
from heterotrain.ported_names import advice

_DEVICE_MEMORY = "OutOfMemoryError"
"""Name of PyTorch's error; this module does not load PyTorch."""


class TerminationMessage:
    """Writes one outcome; after the first one, later ones are ignored."""

    def __init__(
        self,
        path: str | None,
        *,
        where: Callable[[], tuple[int, int]],
        metrics: Callable[[], Mapping[str, float]] = dict,
        checkpoint: Callable[[], tuple[int, float] | None] = lambda: None,
        on_failure: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Prepare to write.

        Args:
            path: of the file; ``None`` for none.
            where: returns epoch and step.
            metrics: returns the values that the script has reported.
            checkpoint: returns step and time, in seconds since 1970, of the newest complete checkpoint.
            on_failure: called with the reason when the script ends with an exception. The interpreter may live on for
                long after that, for example because a thread of the script does not end.
        """
        self._path = Path(path) if path else None
        self._where = where
        self._metrics = metrics
        self._checkpoint, self._on_failure = checkpoint, on_failure
        self._lock = threading.Lock()
        self.outcome: Outcome | None = None

    def install(self) -> None:
        """Write a failure when the script ends with an exception, or ends before training is complete."""
        previous = sys.excepthook

        def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if what := advice(error):
                error.add_note(what)
            reason = f"{kind.__name__}: {error}"
            self.write(Ending.FAILED, reason, cause=cause_of(error))
            with contextlib.suppress(Exception):  # the script's own error is the one to show
                self._on_failure(reason)
            previous(kind, error, trace)

        sys.excepthook = on_exception
        atexit.register(
            self.write,
            Ending.FAILED,
            "the script ended before every epoch was committed: call job.finish(reason) to end early on purpose",
        )

    def write(self, ending: Ending, reason: str, *, told: bool = False, cause: Cause | None = None) -> None:
        """Write the outcome unless one was written before; ``told`` when SIGTERM came."""
        with self._lock:
            if self.outcome is not None:
                return
            epoch, step = self._where()
            saved_step, saved_s = self._checkpoint() or (None, None)
            self.outcome = Outcome(
                ending=ending,
                reason=redacted(reason),
                epoch=epoch,
                step=step,
                metrics=self._metrics(),
                told=told,
                cause=cause,
                checkpoint_step=saved_step,
                checkpoint_time_s=saved_s,
            )
            if self._path is not None:
                with contextlib.suppress(OSError):  # a read-only file: the exit code still tells success from failure
                    self._path.write_text(encode_outcome(self.outcome), encoding="utf-8")


def cause_of(error: BaseException) -> Cause | None:
    """Return the cause of an uncaught error where the operator knows one."""
    if isinstance(error, HeterotrainError):
        return error.cause
    names = {kind.__name__ for kind in type(error).__mro__}
    is_sign = isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)
    return Cause.OUT_OF_DEVICE_MEMORY if _DEVICE_MEMORY in names or is_sign else None
