"""Threads that connections need, where the container's limit of processes leaves room for them.

Gloo starts threads while it connects. Where one of them cannot start, it ends the process without a message, or fails
as if another rank was lost, and the ranks would connect again and again. So it is found out before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from heterotrain.errors import UsageError

CONNECTION_THREADS = 16
"""More than a group of gloo and the mesh start while they connect: 3 of gloo, and some for connections that arrive."""

MOST_IDLE = 16
"""Threads that are kept for the next ``run_beside``; more run at a time if needed."""

_IDLE: list[SimpleQueue[Callable[[], object]]] = []
"""What each idle thread waits for."""
os.register_at_fork(after_in_child=_IDLE.clear)


def run_beside(run: Callable[[], object], name: str) -> None:
    """Run on a daemon thread that an earlier call has left, or on a new one: a start costs more than a short wait.

    Raises:
        UsageError: as ``start_thread``.
    """
    try:
        _IDLE.pop().put(run)
    except IndexError:
        runs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        runs.put(run)
        start_thread(lambda: _serve(runs), name)


def _serve(runs: SimpleQueue[Callable[[], object]]) -> None:
    runs.get()()
    while len(_IDLE) < MOST_IDLE:
        _IDLE.append(runs)
        runs.get()()


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread.

    Raises:
        UsageError: the container's or the user's limit of processes does not allow another one.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise UsageError(
            f"this rank cannot start another thread ({error}): raise the limit of processes (podPidsLimit of the "
            "kubelet, ulimit -u), or start fewer processes in the container, such as those of loaders"
        ) from None
    return thread


def check_room(threads: int = CONNECTION_THREADS) -> None:
    """Check that some threads can run at the same time.

    Raises:
        UsageError: they cannot.
    """
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(threads):
            started.append(start_thread(end.wait, "heterotrain-room"))  # noqa: PERF401  # those before a failure have to end
    finally:
        end.set()
        for thread in started:
            thread.join()
