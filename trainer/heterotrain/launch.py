"""``heterotrain-run SCRIPT [ARGUMENT …]``: runs the ranks of one worker pod, which all end together.

The launcher is the first process of the container. It forwards SIGTERM, reaps orphaned processes, ends all ranks when
one fails, and writes one outcome for the pod. It never loads torch, so its signal handlers are in place at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from heterotrain_core.contract import env
from heterotrain_core.contract.choices import Runtime
from heterotrain_core.contract.outcome import Cause, Ending, Outcome, decode_outcome, encode_outcome
from heterotrain_core.version import __version__

from heterotrain.error_output import ErrorOutput
from heterotrain.telemetry.logs import set_up_logs

_log = logging.getLogger(__name__)

KILL_AFTER_S = 20
"""After one rank has failed, the others are killed unless they end within this time."""
MOST_DESCRIPTORS = 65_536
"""Descriptors that a process may open, where the limit of the container allows it."""

_MOST_SHOWN = 60
_MISTAKE = 2

_LEFT_EARLY = Outcome(ending=Ending.LEFT, reason="received SIGTERM before it had joined", epoch=0, step=0)


_PLAIN = "the script ended with exit code 0 and did not call heterotrain.init()"


def merge(
    outcomes: Sequence[Outcome | None],
    codes: Sequence[int],
    *,
    told: bool,
    errors: Sequence[str] = (),
    first: int = 0,
) -> Outcome:
    """Return a pod's outcome from those of its ranks: one failure is a failure, one leave is a leave.

    Args:
        outcomes: outcomes by local rank; ``None`` for a rank that wrote none.
        codes: exit codes by local rank; negative for a signal.
        told: whether the pod received SIGTERM. A rank that is still loading its libraries then has no peers to notify
            and is ended by the signal itself: it counts as having left.
        errors: by local rank, the last error in its output; empty where there is none.
        first: local rank that failed first. The launcher ended the others, so their ends explain nothing.
    """
    outcomes = [
        _LEFT_EARLY if told and outcome is None and code == -signal.SIGTERM else outcome
        for outcome, code in zip(outcomes, codes, strict=True)
    ]
    written = [outcome for outcome in outcomes if outcome is not None]
    epoch, step = max((o.epoch for o in written), default=0), max((o.step for o in written), default=0)
    metrics = next((o.metrics for o in written if o.metrics), {})
    newest = max(written, key=lambda o: o.checkpoint_time_s or 0.0, default=_LEFT_EARLY)

    def last(ending: Ending, reason: str, cause: Cause | None = None) -> Outcome:
        return Outcome(
            ending=ending,
            reason=reason,
            epoch=epoch,
            step=step,
            metrics=metrics,
            told=told,
            cause=cause,
            checkpoint_step=newest.checkpoint_step,
            checkpoint_time_s=newest.checkpoint_time_s,
        )

    if not written and not any(codes):
        return last(Ending.LEFT if told else Ending.FINISHED, _PLAIN, Cause.PLAIN_SCRIPT)

    ranks = sorted(range(len(codes)), key=lambda rank: rank != first)
    for rank in ranks:
        if (outcome := outcomes[rank]) is not None and outcome.ending is Ending.FAILED:
            return last(Ending.FAILED, f"rank {rank}: {outcome.reason}", outcome.cause)
    for rank in ranks:
        outcome, code = outcomes[rank], codes[rank]
        if code < 0 and outcome is None:  # a rank that has written its outcome may crash while it exits
            return last(Ending.FAILED, f"rank {rank} was ended by {_how(code)}{_own_words(errors, rank)}")
        if code > 0:
            return last(Ending.FAILED, f"rank {rank} ended with {_how(code)}{_own_words(errors, rank)}")
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            reason = f"rank {rank} ended without an outcome: check that the script calls heterotrain.init()"
            return last(Ending.FAILED, reason)
    left = next((outcome for outcome in written if outcome.ending is Ending.LEFT), None)
    return last(Ending.LEFT, left.reason) if left else last(Ending.FINISHED, written[0].reason)


class Launcher:
    """Starts, watches and ends the ranks."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environ = dict(environ)
        self._ranks = int(environ.get(env.NUM_PROC_PER_WORKER, "1") or "1")
        # References are kept: a dropped Popen reaps its process, and ``os.wait`` would then never report that rank.
        self._children: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._codes: dict[int, int] = {}
        self._operated = env.JOB_UID in self._environ
        self._errors: dict[int, ErrorOutput] = {}
        self._ending = False
        self._first = 0
        self._told = False

    def run(self) -> int:
        """Run all ranks to their end; write the pod's outcome and return its exit code."""
        known = {"worker": env.WORKER, "job": env.JOB_NAME, "namespace": env.JOB_NAMESPACE}
        who = {tag: self._environ[name] for tag, name in known.items() if name in self._environ}
        set_up_logs(who, environ=self._environ)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        with tempfile.TemporaryDirectory(prefix="heterotrain-") as folder:
            files = [Path(folder) / f"rank-{rank}" for rank in range(self._ranks)]
            for rank, file in enumerate(files):
                self._start(rank, file)
            self._watch()
            codes = [self._codes[rank] for rank in range(self._ranks)]
            errors = [self._errors[rank].last_error() if rank in self._errors else "" for rank in range(self._ranks)]
            outcome = merge([_read(file) for file in files], codes, told=self._told, errors=errors, first=self._first)
        if not self._operated:  # no operator: ranks write no outcome, and the exit code is the answer
            return next((128 - code if code < 0 else code for code in codes if code), 0)
        path = self._environ.get(env.TERMINATION_PATH, env.DEFAULT_TERMINATION_PATH)
        with contextlib.suppress(OSError):
            Path(path).write_text(encode_outcome(outcome), encoding="utf-8")
        if outcome.ending is not Ending.FAILED:
            return 0
        return next((code for code in codes if code > 0), 1)

    def _start(self, rank: int, outcome_file: Path) -> None:
        # torch's C++ code prints a stack for each broken connection of a lost peer; only its errors matter here.
        environ = (
            {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            | self._environ
            | {
                env.LOCAL_RANK: str(rank),
                env.NUM_PROC_PER_WORKER: str(self._ranks),
                env.TERMINATION_PATH: str(outcome_file),
            }
        )
        if self._operated:
            output = self._errors[rank] = ErrorOutput()
            child = subprocess.Popen(self._command, env=environ, stderr=output.writer)
            output.close_writer()
        else:  # a terminal stays one
            child = subprocess.Popen(self._command, env=environ)
        self._children[child.pid] = (rank, child)

    def _watch(self) -> None:
        """Wait for all ranks; as the first process of a container, also reap other processes."""
        while len(self._codes) < self._ranks:
            pid, status = os.wait()
            if pid not in self._children:
                continue
            rank, child = self._children.pop(pid)
            child.returncode = self._codes[rank] = os.waitstatus_to_exitcode(status)
            ended_well = self._codes[rank] == 0 or (self._told and self._codes[rank] == -signal.SIGTERM)
            if not ended_well and not self._ending:
                self._ending, self._first = True, rank
                if self._ranks > 1:
                    _log.error("rank %d ended with %s: terminating the other ranks", rank, _how(self._codes[rank]))
                self._signal(signal.SIGTERM)
                signal.alarm(KILL_AFTER_S)
        signal.alarm(0)

    def _signal(self, number: int) -> None:
        for pid in list(self._children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._told = True
        self._signal(number)

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        _log.error("%d ranks did not end within %d s: killing them", len(self._children), KILL_AFTER_S)
        self._signal(signal.SIGKILL)


def _own_words(errors: Sequence[str], rank: int) -> str:
    return f": {errors[rank]}" if rank < len(errors) and errors[rank] else ""


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _read(file: Path) -> Outcome | None:
    try:
        return decode_outcome(file.read_text(encoding="utf-8"))
    except OSError:
        return None


def problem_of(arguments: Sequence[str]) -> str:
    """Return what is wrong with a command line and what to do, in one sentence; empty for one that can be started.

    Args:
        arguments: a script or ``torchrun`` with its own arguments; before a script, options of Python of one letter.
    """
    first = arguments[0]
    if first in ("--nproc", "--nproc-per-node", "--nproc_per_node", "--nnodes"):
        return f"{first} is an option of torchrun, which starts several ranks on one machine: run torchrun {first} N …"
    if first.startswith("--"):
        return f"{first[:_MOST_SHOWN]} is not an option: name the script first, and its own options after it"
    if first.startswith("-") or not first.endswith(".py"):
        return ""  # python -m and the like, torchrun, a folder
    if not Path(first).is_file():
        return f"there is no file {first[:_MOST_SHOWN]} in {Path.cwd()}: check the path, or whether the image has it"
    return ""


def _refuse(problem: str, environ: Mapping[str, str]) -> NoReturn:
    """End with one sentence; in a job, it is also the pod's outcome.

    Raises:
        SystemExit: always, with status 2.
    """
    if env.JOB_UID in environ:
        outcome = Outcome(ending=Ending.FAILED, reason=f"heterotrain-run: {problem}", epoch=0, step=0)
        with contextlib.suppress(OSError):
            path = Path(environ.get(env.TERMINATION_PATH, env.DEFAULT_TERMINATION_PATH))
            path.write_text(encode_outcome(outcome), encoding="utf-8")
    print(f"heterotrain-run: {problem}", file=sys.stderr)  # noqa: T201  # output of a command
    raise SystemExit(_MISTAKE)


def _allow_descriptors() -> None:
    """Raise the limit of open descriptors: some container runtimes start with 1024, and peers and strangers use some.

    Gloo ends the process when there are none left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script given on the command line.

    Raises:
        SystemExit: always, with the pod's exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        usage = (
            "usage: heterotrain-run SCRIPT [ARGUMENT …]\n\nStarts the script once for each rank of this worker.\n"
            "In a job with `runtime: Torchrun`, SCRIPT is an unchanged script for torchrun, or `torchrun` itself."
        )
        print(usage)  # noqa: T201  # output of a command
        raise SystemExit(0 if given else 2)
    if given[0] == "--version":
        print(f"heterotrain-run, version {__version__}")  # noqa: T201  # output of a command
        raise SystemExit(0)
    if problem := problem_of(given):
        _refuse(problem, os.environ)
    _allow_descriptors()
    if Runtime(os.environ.get(env.RUNTIME, Runtime.HETEROTRAIN)) is Runtime.TORCHRUN:
        from heterotrain.torchrun.launcher import run  # noqa: PLC0415  # needs a package of the extra `trainer`

        raise SystemExit(run(given))
    raise SystemExit(Launcher([sys.executable, *given], os.environ).run())


if __name__ == "__main__":
    main()
