"""``heterotrain-run SCRIPT [ARGUMENT …]``: the ranks of one worker pod, which share its fate.

The launcher is the container's first process: it hands SIGTERM on, reaps whatever was orphaned, ends all ranks when one
fails, and writes one outcome for the pod. It never loads torch, so that a signal finds a handler from the first moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from heterotrain_core.contract import env
from heterotrain_core.contract.outcome import Ending, Outcome, decode_outcome, encode_outcome

from heterotrain.telemetry.logs import set_up_logs

_log = logging.getLogger(__name__)

KILL_AFTER_S = 20
"""After one rank failed, the others get this long to end before they are killed."""

_LEFT_EARLY = Outcome(ending=Ending.LEFT, reason="told to go before it had joined", epoch=0, step=0)


def merge(outcomes: Sequence[Outcome | None], codes: Sequence[int], *, told: bool) -> Outcome:
    """Return a pod's outcome from those of its ranks: one failure is a failure, one leave is a leave.

    Args:
        outcomes: by local rank; ``None`` for a rank that left no word.
        codes: exit codes by local rank; negative for a signal.
        told: whether the pod was told to go. A rank that still loads its libraries then has nobody to say goodbye to, and
            ends by the very signal: it left.
    """
    outcomes = [
        _LEFT_EARLY if told and outcome is None and code == -signal.SIGTERM else outcome
        for outcome, code in zip(outcomes, codes, strict=True)
    ]
    said = [outcome for outcome in outcomes if outcome is not None]
    epoch, step = max((o.epoch for o in said), default=0), max((o.step for o in said), default=0)
    metrics = next((o.metrics for o in said if o.metrics), {})

    def last(ending: Ending, reason: str) -> Outcome:
        return Outcome(ending=ending, reason=reason, epoch=epoch, step=step, metrics=metrics, told=told)

    for rank, outcome in enumerate(outcomes):
        if outcome is not None and outcome.ending is Ending.FAILED:
            return last(Ending.FAILED, f"rank {rank}: {outcome.reason}")
    for rank, (outcome, code) in enumerate(zip(outcomes, codes, strict=True)):
        if code < 0 and outcome is None:  # whoever said goodbye may crash on the way out
            return last(Ending.FAILED, f"rank {rank} was ended by {_how(code)}")
        if code > 0:
            return last(Ending.FAILED, f"rank {rank} ended with {_how(code)}")
        if outcome is None:
            return last(Ending.FAILED, f"rank {rank} ended without a word: does the script call heterotrain.init()?")
    left = next((outcome for outcome in said if outcome.ending is Ending.LEFT), None)
    return last(Ending.LEFT, left.reason) if left else last(Ending.FINISHED, said[0].reason)


class Launcher:
    """Starts, watches and ends the ranks."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environ = dict(environ)
        self._ranks = int(environ.get(env.NUM_PROC_PER_WORKER, "1") or "1")
        # Whoever drops a Popen asks for its exit code, and ``os.wait`` would wait in vain for a rank that has ended already.
        self._children: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._codes: dict[int, int] = {}
        self._ending = False
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
            words = [Path(folder) / f"rank-{rank}" for rank in range(self._ranks)]
            for rank, word in enumerate(words):
                self._start(rank, word)
            self._watch()
            codes = [self._codes[rank] for rank in range(self._ranks)]
            outcome = merge([_read(word) for word in words], codes, told=self._told)
        path = self._environ.get(env.TERMINATION_PATH, env.DEFAULT_TERMINATION_PATH)
        if env.JOB_UID in self._environ:
            with contextlib.suppress(OSError):
                Path(path).write_text(encode_outcome(outcome), encoding="utf-8")
        if outcome.ending is not Ending.FAILED:
            return 0
        return next((code for code in codes if code > 0), 1)

    def _start(self, rank: int, word: Path) -> None:
        # torch's C++ side prints a stack for each connection that a lost peer leaves behind; only its errors are news.
        environ = (
            {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            | self._environ
            | {
                env.LOCAL_RANK: str(rank),
                env.NUM_PROC_PER_WORKER: str(self._ranks),
                env.TERMINATION_PATH: str(word),
            }
        )
        child = subprocess.Popen(self._command, env=environ)
        self._children[child.pid] = (rank, child)

    def _watch(self) -> None:
        """Wait for all ranks; as the first process of a container this also reaps strangers."""
        while len(self._codes) < self._ranks:
            pid, status = os.wait()
            if pid not in self._children:
                continue
            rank, child = self._children.pop(pid)
            child.returncode = self._codes[rank] = os.waitstatus_to_exitcode(status)
            went = self._codes[rank] == 0 or (self._told and self._codes[rank] == -signal.SIGTERM)
            if not went and not self._ending:
                self._ending = True
                _log.error(
                    "rank %d of the pod ended with %s: the others are told to end", rank, _how(self._codes[rank])
                )
                self._tell(signal.SIGTERM)
                signal.alarm(KILL_AFTER_S)
        signal.alarm(0)

    def _tell(self, number: int) -> None:
        for pid in list(self._children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._told = True
        self._tell(number)

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        _log.error("%d ranks of the pod did not end within %d s: they are killed", len(self._children), KILL_AFTER_S)
        self._tell(signal.SIGKILL)


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _read(word: Path) -> Outcome | None:
    try:
        return decode_outcome(word.read_text(encoding="utf-8"))
    except OSError:
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script given on the command line.

    Raises:
        SystemExit: always, with the pod's exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print("usage: heterotrain-run SCRIPT [ARGUMENT …]\n\nStarts the script once for each rank of this worker.")  # noqa: T201  # a command's own words
        raise SystemExit(0 if given else 2)
    raise SystemExit(Launcher([sys.executable, *given], os.environ).run())


if __name__ == "__main__":
    main()
