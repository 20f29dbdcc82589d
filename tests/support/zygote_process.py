"""A process that has loaded torch once and forks processes from it: each starts in milliseconds instead of seconds.

Commands are JSON lines on standard input. ``{"name", "environ", "output", "script", "arguments"}`` calls a function,
``script`` is ``module:function``. ``{"name", "environ", "output", "errors", "folder", "program", "arguments"}`` runs a
program as a fresh interpreter does: a script by its path, or a module after ``-m``. Messages are JSON lines on standard
output: ``{"name", "pid"}`` for a started process, ``{"name", "code"}`` for an ended one. The process forks while it has
one thread and has computed nothing, because only in this state is it safe to fork torch.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType
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
    gc.collect()
    gc.freeze()  # collections in a fork leave out what is loaded here, whose pages stay shared
    for loaded in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # torch takes its operators apart
        loaded.atexit = False
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
    os._exit(0)  # an interpreter with torch takes long to end


def _start(command: dict[str, Any], children: dict[int, str]) -> None:
    pid = os.fork()
    if pid == 0:
        _child(command)
    children[pid] = command["name"]
    _say({"name": command["name"], "pid": pid})


def _child(command: dict[str, Any]) -> None:
    """Behave like a fresh interpreter."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for number, path in ((1, command["output"]), (2, command.get("errors", command["output"]))):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.register(signal.SIGUSR1, file=2)
        torch.set_num_threads(1)
        if "program" in command:
            os.environ.clear()
            os.environ.update(command["environ"])
            os.chdir(command["folder"])
            _run(command["program"], command["arguments"])
        else:
            os.environ.update(command["environ"])
            module, function = command["script"].split(":")
            getattr(importlib.import_module(module), function)(**command["arguments"])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next  # the script's own frames follow
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    finally:
        if "program" in command:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(program: str, arguments: list[str]) -> None:
    """Run a script, or a module after ``-m``, as ``__main__``."""
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(file=2)
    if program == "-m":
        sys.argv, sys.path[0] = arguments, str(Path.cwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")  # loader processes and error messages look for the script there
    main.__file__ = program
    sys.modules["__main__"] = main
    sys.argv, sys.path[0] = [program, *arguments], str(Path(program).parent)
    exec(compile(Path(program).read_bytes(), program, "exec"), vars(main))  # noqa: S102  # a test's own script


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
