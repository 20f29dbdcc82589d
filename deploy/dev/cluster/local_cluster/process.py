"""Programs: run them, identify them beyond the reuse of process numbers, and wait for conditions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class Problem(Exception):  # noqa: N818  # it is shown to a person as "problem: …"
    """An error that the user can act on, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process number with the kernel's start time of the process; together they are unique until a reboot."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process.

        Raises:
            Problem: it does not run.
        """
        ticks = _started_ticks(pid)
        if ticks is None:
            raise Problem(f"process {pid} has already ended")
        return cls(pid=pid, started_ticks=ticks)

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return _started_ticks(self.pid) == self.started_ticks

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until the kernel has removed it."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not self.is_alive, f"process {self.pid} to end", timeout_s=30, every_s=0.005)


def _started_ticks(pid: int) -> int | None:
    try:
        # The name in parentheses may hold anything, so fields are counted from the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def child_of(pid: int) -> int | None:
    """Return the number of the only child of a process, or None while it has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


def run(
    *command: str | Path,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 240,
) -> str:
    """Return the standard output of a command.

    Raises:
        Problem: it failed, was not found or took longer than ``timeout_s``; the message holds the end of its output.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            env=None if environment is None else {**os.environ, **environment},
            cwd=cwd,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise Problem(f"{words[0]} is not installed: `make cluster` installs it, given root and apt") from error
    except subprocess.TimeoutExpired as error:
        raise Problem(f"`{' '.join(words[:6])}` was not done after {timeout_s:.0f} s") from error
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip())[-1500:]
        raise Problem(f"`{' '.join(words[:6])}` failed: {output or f'exit code {done.returncode}'}")
    return done.stdout


def follow(
    *command: str | Path, on_line: Callable[[str], None], environment: Mapping[str, str], cwd: Path | None = None
) -> None:
    """Run a command that takes minutes, and call ``on_line`` with each line of its standard error.

    Raises:
        Problem: it failed; the message holds the end of its output.
    """
    words = [str(word) for word in command]
    last: deque[str] = deque(maxlen=30)
    quiet, environment = subprocess.DEVNULL, {**os.environ, **environment}
    with subprocess.Popen(
        words, env=environment, cwd=cwd, text=True, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE
    ) as process:
        for line in process.stderr or ():
            on_line(line)
            last.append(line)
    if process.returncode != 0:
        raise Problem(f"`{' '.join(words[:6])}` failed: {''.join(last)[-1500:] or f'exit code {process.returncode}'}")


def wait_until(probe: Callable[[], bool], what: str, *, timeout_s: float, every_s: float = 0.1) -> None:
    """Return as soon as ``probe`` holds.

    Raises:
        Problem: ``timeout_s`` passed first.
    """
    deadline_s = time.monotonic() + timeout_s
    while not probe():
        if time.monotonic() > deadline_s:
            raise Problem(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(every_s)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print the start of a step and, at its end, its duration."""
    started_s = time.monotonic()
    say(f"    {what} …")
    yield
    say(f"    {what}: {time.monotonic() - started_s:.1f} s")


def say(*words: str) -> None:
    """Print progress to standard error; standard output is for results."""
    print(*words, file=sys.stderr, flush=True)


def niced(command: Sequence[str | Path]) -> list[str | Path]:
    """Return the command with a low priority, so that the machine stays usable while it runs."""
    return ["nice", "-n", "10", *command]
