"""The processes of one pod in one generation: started together, ended together, with all that they have started."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from heterotrain.error_output import ErrorOutput

_log = logging.getLogger(__name__)


class Processes:
    """Child processes, each the first of a process group of its own.

    A signal reaches the whole group: the processes of a ``torchrun`` that was killed must not keep their device.
    """

    def __init__(self) -> None:
        # References are kept: a dropped Popen reaps its process, and ``reap`` would then never see its exit code.
        self._children: list[subprocess.Popen[bytes]] = []
        self._errors: list[ErrorOutput] = []
        self.codes: dict[int, int] = {}

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start one more process."""
        output = ErrorOutput()
        self._errors.append(output)
        child = subprocess.Popen(command, env=environ, start_new_session=True, stderr=output.writer)
        output.close_writer()
        self._children.append(child)

    @property
    def ended(self) -> bool:
        """Whether all have ended."""
        return len(self.codes) == len(self._children)

    @property
    def failed(self) -> bool:
        """Whether one has failed."""
        return any(self.codes.values())

    def failure(self) -> str:
        """Return which process failed, how, and its last error."""
        index, code = next((index, code) for index, code in sorted(self.codes.items()) if code != 0)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        error = self._errors[index].last_error()
        return f"process {index} of the worker ended with {how}{f': {error}' if error else ''}"

    def reap(self) -> None:
        """Collect the exit codes of ended processes; as the first process of a container, also those of orphans."""
        indices = {child.pid: index for index, child in enumerate(self._children)}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (index := indices.get(pid)) is not None:
                self._children[index].returncode = self.codes[index] = os.waitstatus_to_exitcode(status)
                self._signal(self._children[index], signal.SIGKILL)  # what it has left behind

    def terminate(self) -> None:
        """Ask those that run to end."""
        self._signal_all(signal.SIGTERM)

    def kill(self) -> None:
        """End those that run."""
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for index, child in enumerate(self._children):
            if index not in self.codes:
                self._signal(child, number)

    @staticmethod
    def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
