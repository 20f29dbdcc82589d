"""A rank's error output: passed on at once, and its end kept.

A script that fails before or without ``heterotrain.init()`` writes no outcome; its last error is all there is.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading

KEPT_BYTES = 16 * 1024
MAX_ERROR = 500
"""Characters of an error in an outcome."""
JOIN_S = 2.0
"""Time for the rest of the output; a process that the rank has started may keep the pipe open for ever."""
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_TRACEBACK = "Traceback (most recent call last):"


def last_error(text: str) -> str:
    """Return the last uncaught error in an output, else its last line.

    The text is printable and has at most ``MAX_ERROR`` characters.
    PyTorch writes ``[rank0]: `` before each line of a traceback; that is left out.
    """
    lines = [_RANK_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    begin = next((at for at in reversed(range(len(lines))) if lines[at].endswith(_TRACEBACK)), None)
    after = lines[begin + 1 :] if begin is not None else []
    found = next((line for line in after if line and not line[0].isspace()), "")
    found = found or next((line for line in reversed(lines) if line.strip()), "")
    return "".join(each if each.isprintable() else " " for each in found).strip()[:MAX_ERROR]


class ErrorOutput:
    """A pipe for the error output of one process.

    Attributes:
        writer: the end that the process writes to.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._pass_on, name="heterotrain-error-output", daemon=True)
        self._thread.start()

    def close_writer(self) -> None:
        """Close this process's copy of the writing end, so that the pipe ends with the other process."""
        os.close(self.writer)

    def last_error(self) -> str:
        """Return the last error of the process, once it has ended; empty without any output."""
        self._thread.join(JOIN_S)
        return last_error(bytes(self._kept).decode(errors="replace"))

    def _pass_on(self) -> None:
        while chunk := os.read(self._reader, 65536):
            self._kept = (self._kept + chunk)[-KEPT_BYTES:]
            with contextlib.suppress(OSError):  # nobody reads the container's log any more
                _write_all(chunk)
        os.close(self._reader)


def _write_all(chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:
        left = left[os.write(2, left) :]
