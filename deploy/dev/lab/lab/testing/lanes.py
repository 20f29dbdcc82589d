"""Programs in lanes: lanes run side by side, each one program after the other.

A failure stops all lanes, unless the program is one whose failure leaves the others meaningful, such as tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ENDS_S = 60.0
"""A program that was interrupted has this long to clean up."""
PROGRESS_S = 30.0
"""Running programs are named this often."""
BEHIND = 10
"""Niceness of a program that lets others go first; it still gets a tenth of a processor."""

Lane = Callable[[], None]


class Stopped(Exception):  # noqa: N818  # it ends a lane and is no error of this lane
    """The program was not started, or was interrupted, because another lane has failed."""


class Failed(Exception):  # noqa: N818  # the program's output, which is printed before, tells the error
    """A program has ended with another code than 0."""


@dataclass(slots=True)
class Programs:
    """Programs that run at the same time; what each one prints appears in one piece at its end.

    Attributes:
        folder: where the output of running programs goes, in files named after them.
        seconds: duration of each program that has ended by itself.
        progress: a program's name to a few words on how far it is.
        problem: the first failure that stopped the lanes.
        failed: the programs that failed and stopped nothing.
    """

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    progress: Callable[[str], str] = str
    problem: BaseException | None = None
    failed: list[str] = field(default_factory=list)
    _running: dict[subprocess.Popen[bytes], bool] = field(default_factory=dict)  # whether it lets others go first
    _names: dict[subprocess.Popen[bytes], str] = field(default_factory=dict)
    _behind: bool = False
    _started_s: float = field(default_factory=time.monotonic)
    _told_s: float = field(default_factory=time.monotonic)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        with self._lock:
            self._told_s = time.monotonic()
            print(f"\n==> [{self._told_s - self._started_s:4.0f} s] {text}", flush=True)

    def run(
        self,
        name: str,
        *command: str,
        environment: Mapping[str, str] | None = None,
        yields: bool = False,
        may_fail: bool = False,
        fine: Collection[int] = (0,),
    ) -> int:
        """Run a program to its end, print its output and return its exit code.

        Args:
            name: what people call it; it also names the file with its output.
            command: the program and its arguments.
            environment: all of its variables; those of this process by default.
            yields: whether it lets others go first between ``hold_back`` and ``go_on``.
            fine: exit codes that are no failure.
            may_fail: whether the others go on after its failure, which ``failed`` then names.

        Raises:
            Failed: it has ended with another code than 0 and must not.
            Stopped: another program has failed.
        """
        path = self.folder / f"{name.replace(' ', '-')}.log"
        with self._lock, path.open("wb") as output:
            if self.problem is not None:
                raise Stopped(name)
            began_s = time.monotonic()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            self._running[process], self._names[process] = yields, name
            if yields and self._behind:
                _set_niceness(process, BEHIND)
            self.say(f"{name}: started, with output in {path}")
        code = process.wait()
        with self._lock:
            del self._running[process]
            if self.problem is not None:
                raise Stopped(name)
            self.seconds[name] = time.monotonic() - began_s
            self.say(f"{name}: {'passed' if code in fine else 'FAILED'} after {self.seconds[name]:.0f} s")
            print(path.read_text(errors="replace"), end="", flush=True)
            if code not in fine and may_fail:
                self.failed.append(name)
            elif code not in fine:
                self.problem = Failed(name)
                raise self.problem
        return code

    def drain(self, jobs: Sequence[Lane], *, at_once: int) -> None:
        """Run jobs in their order, as many at a time as there are places; only the main thread may call this.

        Raises:
            BaseException: the first failure.
        """
        waiting = deque(jobs)

        def place() -> None:
            while True:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                job()

        self.side_by_side([place] * min(at_once, len(jobs)))

    def hold_back(self) -> None:
        """Let programs that yield take what the others leave, from now on."""
        self._set_behind(behind=True)

    def go_on(self) -> None:
        """End that."""
        self._set_behind(behind=False)

    def _set_behind(self, *, behind: bool) -> None:
        with self._lock:
            self._behind = behind
            for process, yields in self._running.items():
                if yields:
                    _set_niceness(process, BEHIND if behind else 0)

    def side_by_side(self, lanes: Sequence[Lane]) -> None:
        """Run lanes at the same time; after the first failure, interrupt all programs and wait for their ends.

        Only the main thread may call this.

        Raises:
            BaseException: the first failure.
        """
        # Programs of a shell's background job ignore SIGINT; those that are started from here must not.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._join(lanes)
        finally:
            signal.signal(signal.SIGINT, before)
        if self.problem is not None:
            raise self.problem

    def _join(self, lanes: Sequence[Lane]) -> None:
        threads = [threading.Thread(target=self._follow, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():  # a signal is handled between two waits
                    thread.join(timeout=0.2)
                    self._tell_progress()
        except BaseException as error:  # noqa: BLE001  # Ctrl-C, too, is raised at the end
            self._stop(error)
            for thread in threads:
                thread.join()

    def _tell_progress(self) -> None:
        with self._lock:
            if self._running and time.monotonic() - self._told_s >= PROGRESS_S:
                self.say("; ".join(self.progress(self._names[process]) for process in self._running))

    def _follow(self, lane: Lane) -> None:
        try:
            lane()
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001  # the main thread raises it
            self._stop(error)

    def _stop(self, problem: BaseException) -> None:
        """Interrupt all running programs as Ctrl-C does, and kill those that do not end in time."""
        with self._lock:
            self.problem = self.problem or problem
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGINT)
        end_s = time.monotonic() + ENDS_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(end_s - time.monotonic(), 0.1))
            _signal(process, signal.SIGKILL)  # what is left of its group, too


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _set_niceness(process: subprocess.Popen[bytes], niceness: int) -> None:
    """Set the niceness of a program's whole session; without effect where the kernel has no groups of sessions."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(niceness))
