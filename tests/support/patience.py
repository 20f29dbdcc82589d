"""A clock of patience for tests with real processes: real time without the time in which they waited for a processor.

A limit on this clock cannot pass only because a machine has other work: while a process of the test waits for a
processor, the clock nearly stands still. It also stands still for a process that waits for such a process. On an idle
machine it is real time. It never runs slower than at a tenth of real time, so behind each limit is a real one ten
times as long, and a test that hangs still ends.

How long processes waited is in the kernel's accounts (``/proc/pressure/cpu``): the time in which at least one runnable
task of a group waited. ``share`` gives the calling process and its descendants a control group of their own, whose
account leaves out the machine's other work. Without the right to do so, the account of the whole machine is as safe,
but the clock also stands still for the others. Without any account of the kernel, a process of the lowest priority
that sleeps and wakes counts the time in which there was a processor for it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

Clock = Callable[[], float]
"""Returns seconds; differences of two readings count."""

RELUCTANCE: Final = 10.0
"""The clock runs at least at this fraction of real time; a real limit is this many times as long."""
LOOK_S: Final = 0.005
"""Readings of the accounts are this far apart; a reading of the clock in between returns the last one."""
VARIABLE: Final = "PATIENCE_ACCOUNT"
"""Names the file with the account, for descendants of the process that called ``share``."""
MACHINE: Final = Path("/proc/pressure/cpu")
GROUPS: Final = "heterotrain-tests-"
"""Prefix of the control groups that ``share`` makes."""
_TICK_S: Final = 0.01
_COUNT: Final = struct.Struct("=d")


class PatienceClock:
    """Real time without the waits of an account; may be read from any thread."""

    def __init__(self, waited_s: Clock, *, real_s: Clock = time.monotonic) -> None:
        """Begin at the real clock's time.

        Args:
            waited_s: returns the seconds of waiting so far.
            real_s: real time.
        """
        self._waited_s, self._real_s = waited_s, real_s
        self._lock = threading.Lock()
        self._now_s = self._seen_real_s = real_s()
        self._seen_waited_s = waited_s()

    def __call__(self) -> float:
        """Return the seconds so far; never less than before. Safe in a signal handler."""
        if self._lock.acquire(blocking=False):  # else another reading is in progress, maybe below this very call
            try:
                passed_s = self._real_s() - self._seen_real_s
                if passed_s >= LOOK_S:
                    waited_s = self._waited_s()
                    self._now_s += max(passed_s - max(0.0, waited_s - self._seen_waited_s), passed_s / RELUCTANCE)
                    self._seen_real_s += passed_s
                    self._seen_waited_s = waited_s
            finally:
                self._lock.release()
        return self._now_s

    def renew_lock(self) -> None:
        """Forget a lock that another thread held when this process was forked."""
        self._lock = threading.Lock()


class Pressure:
    """Seconds in which a task waited for a processor, from a file of the kernel's pressure stall information.

    The kernel takes the mean over processors, weighed by the time in which the group had work at each. A group that
    waits at one and runs at another makes progress, so this is less than the wait of the slowest task. Limits have room
    for that. Time that a virtual machine's host took away is added.
    """

    def __init__(self, path: Path, *, statistics: Path = Path("/proc/stat")) -> None:
        """Open the files.

        Raises:
            OSError: the kernel keeps no such account.
        """
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._statistics = os.open(statistics, os.O_RDONLY | os.O_CLOEXEC)
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._counted_s = 0.0
        self._read()

    def __del__(self) -> None:
        """Close the files."""
        for name in ("_file", "_statistics"):
            with contextlib.suppress(AttributeError, OSError):
                os.close(getattr(self, name))

    def __call__(self) -> float:
        """Return the seconds since an arbitrary moment; no more of them after the group has been removed."""
        with contextlib.suppress(OSError):
            self._counted_s = self._read()
        return self._counted_s

    def _read(self) -> float:
        text = os.pread(self._file, 256, 0)
        start = text.index(b"total=") + len(b"total=")
        some_s = int(text[start : text.index(b"\n", start)]) / 1e6
        stolen = int(os.pread(self._statistics, 256, 0).split(maxsplit=9)[8])
        return some_s + stolen * self._tick_s


class SleeperCount:
    """Seconds in which a process of the lowest priority did not get a processor; see ``count_when_idle``."""

    def __init__(self, path: Path, *, real_s: Clock = time.monotonic) -> None:
        """Map the file that the process writes.

        Raises:
            OSError, ValueError: it cannot be mapped.
        """
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNT.size, prot=mmap.PROT_READ)
        self._real_s = real_s

    def __call__(self) -> float:
        """Return the seconds since an arbitrary moment."""
        (idle_s,) = _COUNT.unpack(self._memory[:])
        return self._real_s() - float(idle_s)


def count_when_idle(path: Path, *, parent: int) -> None:
    """Count the time in which this process, at the lowest priority, wakes in time; end after the parent."""
    with contextlib.suppress(AttributeError, OSError):  # elsewhere than on Linux, niceness has to do
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(19)
    with contextlib.suppress(OSError):  # where the kernel shares out processors by session first
        Path("/proc/self/autogroup").write_text("19")
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), _COUNT.size)
    seen_s = time.monotonic()
    while os.getppid() == parent:
        time.sleep(_TICK_S)
        now_s = time.monotonic()
        (idle_s,) = _COUNT.unpack(memory[:])
        # A sleep takes somewhat longer on an idle machine, too; anything beyond is a wait for a processor.
        memory[:] = _COUNT.pack(idle_s + min(now_s - seen_s, 2 * _TICK_S))
        seen_s = now_s


def account(environment: os._Environ[str] | dict[str, str] = os.environ, *, machine: Path = MACHINE) -> Clock:
    """Return the account that ``share`` chose in this process or an ancestor, else that of the machine."""
    chosen = Path(environment.get(VARIABLE) or machine)
    try:
        return Pressure(chosen) if chosen.name.startswith("cpu") else SleeperCount(chosen)
    except (OSError, ValueError):  # not on this machine, or the session that chose it has ended
        return Pressure(machine) if _keeps_account(machine) else lambda: 0.0


@contextlib.contextmanager
def share(*, machine: Path = MACHINE) -> Iterator[None]:
    """Choose the account for this process and the descendants that it starts within the context."""
    with contextlib.ExitStack() as stack:
        if VARIABLE in os.environ:
            yield
            return
        group = stack.enter_context(_own_group())
        if group is not None:
            path: Path | None = group / "cpu.pressure"
        else:
            path = None if _keeps_account(machine) else stack.enter_context(_sleeper())
        stack.callback(_process_clock.renew)
        if path is not None:
            os.environ[VARIABLE] = str(path)
            stack.callback(os.environ.pop, VARIABLE, None)
        _process_clock.renew()
        yield


def now_s() -> float:
    """Return the seconds of this process's clock of patience."""
    return _process_clock()


def _keeps_account(path: Path) -> bool:
    try:
        Pressure(path)
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _own_group() -> Iterator[Path | None]:
    """Move this process into a new control group with an account of its own; ``None`` without the right to."""
    home = _current_group()
    group = home / f"{GROUPS}{os.getpid()}" if home is not None else None
    try:
        if home is None or group is None:
            raise FileNotFoundError
        for earlier in home.glob(f"{GROUPS}*"):  # of sessions that were killed; the kernel keeps those with processes
            with contextlib.suppress(OSError):
                earlier.rmdir()
        group.mkdir()
        Pressure(group / "cpu.pressure")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except (OSError, ValueError):
        if group is not None:
            with contextlib.suppress(OSError):
                group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):  # a descendant may still run: the next session removes the group
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()


def _current_group() -> Path | None:
    """Return the folder of this process's control group in the unified hierarchy."""
    with contextlib.suppress(OSError, StopIteration):
        mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
        root = next(Path(fields[1]) for fields in mounts if fields[2] == "cgroup2")
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        return root / next(line[3:] for line in lines if line.startswith("0::")).strip("/")
    return None


@contextlib.contextmanager
def _sleeper() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "idle")
        path.write_bytes(_COUNT.pack(0.0))
        command = [sys.executable, __file__, str(path), str(os.getpid())]
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                yield path
            finally:
                process.kill()


class _ProcessClock:
    """The clock of this process, made at its first reading and again when the account changes."""

    def __init__(self) -> None:
        self._clock: PatienceClock | None = None
        self._offset_s = 0.0

    def __call__(self) -> float:
        if self._clock is None:
            self._clock = PatienceClock(account())
        return self._offset_s + self._clock()

    def forked(self) -> None:
        """Continue in a new process."""
        if self._clock is not None:
            self._clock.renew_lock()

    def renew(self) -> None:
        """Continue from the same reading by the account of the present environment."""
        if self._clock is not None:
            now_s = self()
            self._clock = PatienceClock(account())
            self._offset_s = now_s - self._clock()


_process_clock = _ProcessClock()
os.register_at_fork(after_in_child=_process_clock.forked)

if __name__ == "__main__":
    count_when_idle(Path(sys.argv[1]), parent=int(sys.argv[2]))
