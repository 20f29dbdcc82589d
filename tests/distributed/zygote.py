"""A process that has loaded torch once and forks workers from it: a worker starts in milliseconds instead of seconds.

Commands are JSON lines on standard input (``{"name", "environ", "output", "script", "arguments"}``). Messages are JSON
lines on standard output: ``{"name", "pid"}`` for a started worker, ``{"name", "code"}`` for an ended one. The process
forks while it has one thread and has computed nothing, because only in this state is it safe to fork torch.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import json
import os
import select
import signal
import sys
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import heterotrain.initialization  # noqa: E402  # after the thread counts; loaded for the forked workers
import heterotrain.session  # noqa: E402  # after the thread counts
import torch  # noqa: E402  # after the thread counts
import torch._dynamo  # noqa: E402  # after the thread counts; every optimizer needs it
from heterotrain.network import connection_setup  # noqa: E402  # after the thread counts
from support import patience  # noqa: E402  # after the thread counts

heterotrain.initialization.Job = functools.partial(heterotrain.session.Job, clock=patience.now_s)  # type: ignore[misc, assignment]  # makes jobs, as the class does
# Sockets and gloo count these in real time, so they get the limit that is behind one of the clock of patience.
connection_setup.SETUP_S *= patience.RELUCTANCE
connection_setup.CONNECT_S *= patience.RELUCTANCE


def main() -> None:
    """Serve until standard input ends, then kill the remaining workers."""
    children: dict[int, str] = {}
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(children)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _start(json.loads(line), children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _start(command: dict[str, Any], children: dict[int, str]) -> None:
    pid = os.fork()
    if pid == 0:
        _child(command)
    children[pid] = command["name"]
    _say({"name": command["name"], "pid": pid})


def _child(command: dict[str, Any]) -> None:
    """Behave like a fresh interpreter that runs one function."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.register(signal.SIGUSR1, file=2)
        os.environ.update(command["environ"])
        torch.set_num_threads(1)
        module, function = command["script"].split(":")
        getattr(importlib.import_module(module), function)(**command["arguments"])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        name = children.pop(pid, None)
        if name is not None:
            _say({"name": name, "code": os.waitstatus_to_exitcode(status)})


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
