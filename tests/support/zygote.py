"""The test's side of the process that has loaded torch once: starts functions and programs in forks of it."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import patience
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
START_S = 300.0
"""Time for the zygote to load torch."""
PROGRAM_S = 240.0
"""Below pytest's own limit, so that a failure comes with what the program printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended; processes that it started may still be running and writing to the same files."""

    code: int
    output: Path
    errors: Path

    @property
    def stdout(self) -> str:
        """What it and its processes have printed so far."""
        return self.output.read_text()

    @property
    def stderr(self) -> str:
        """What it and its processes have printed to the standard error output so far."""
        return self.errors.read_text()

    @property
    def text(self) -> str:
        """What they have printed to both so far."""
        return self.stdout + self.stderr


class Inbox(queue.Queue[dict[str, Any]]):
    """The messages about one process; limits count on the clock of patience."""

    def get(self, block: bool = True, timeout: float | None = None) -> dict[str, Any]:  # noqa: FBT002  # as in the class
        """Return the next message."""
        end_s = None if timeout is None else patience.now_s() + timeout
        while end_s is not None and block:
            try:
                return super().get(timeout=0.5)
            except queue.Empty:
                if patience.now_s() >= end_s:
                    raise
        return super().get(block=block)


class Zygote:
    """The process that forks others."""

    def __init__(self, *, sees_gpus: bool = False) -> None:
        paths = [str(ROOT / part) for part in ("core", "trainer", "tests")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        # Asking NVML whether there is a GPU leaves CUDA untouched, so that its children may still use it.
        environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if sees_gpus else {"CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote_process.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ,
        )  # fmt: skip
        self._inboxes: dict[str, Inbox] = {}
        self._programs = itertools.count()
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, name: str, command: dict[str, Any]) -> Inbox:
        """Fork a process and return the queue of its messages."""
        inbox = self._inboxes[name] = Inbox()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": name, **command}).encode() + b"\n")
        self._process.stdin.flush()
        return inbox

    def launch(self, folder: Path, *command: str, inside: Path | None = None, **environ: str) -> Program:
        """Start a program and return it.

        Args:
            folder: for its output.
            command: a script's path, or ``-m`` and a module; then arguments.
            inside: its working directory; ``folder`` by default.
            environ: its environment, beside ``HOME`` and what every interpreter of the tests has.
        """
        program, *arguments = command
        number = next(self._programs)
        output, errors = folder / f"output-{number}", folder / f"errors-{number}"
        inbox = self.start(f"program-{number}", {
            "environ": {"HOME": str(folder)} | kept() | environ, "folder": str(inside or folder),
            "output": str(output), "errors": str(errors), "program": program, "arguments": arguments,
        })  # fmt: skip
        return Program(inbox=inbox, output=output, errors=errors)

    def run(self, folder: Path, *command: str, inside: Path | None = None, **environ: str) -> Ended:
        """Run a program as ``launch`` does, and return how it ended."""
        return self.launch(folder, *command, inside=inside, **environ).ended()

    def close(self) -> None:
        """End the process and its children."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=START_S * patience.RELUCTANCE)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            self._inboxes[message["name"]].put(message)


def kept() -> dict[str, str]:
    """Return what every interpreter of the tests has in its environment."""
    return {name: os.environ[name] for name in ("PATH", "PYTHONPYCACHEPREFIX") if name in os.environ}


@dataclass(slots=True, kw_only=True)
class Program:
    """A program in a fork of the zygote."""

    inbox: Inbox
    output: Path
    errors: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, ``None`` while it runs."""
        while self.code is None and not self.inbox.empty():
            self.code = self.inbox.get().get("code")
        return self.code

    def ended(self) -> Ended:
        """Wait for its end, and return it."""

        def printed() -> str:
            return "\n".join(path.read_text() for path in (self.output, self.errors) if path.exists())

        wait_until(lambda: self.poll() is not None, "the program ends", timeout_s=PROGRAM_S, evidence=printed)
        assert self.code is not None
        return Ended(code=self.code, output=self.output, errors=self.errors)
