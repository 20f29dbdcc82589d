"""Threads that the limit of processes does not allow: one sentence, before gloo starts its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest
from heterotrain.errors import UsageError
from heterotrain.network.connection_attempt import Attempt
from heterotrain.network.threads import CONNECTION_THREADS, run_beside
from support.waiting import wait_until

SENTENCE = "this rank cannot start another thread (can't start new thread): raise the limit of processes"
LIMITED = """
import os, resource
from heterotrain.errors import UsageError
from heterotrain.network.threads import check_room, start_thread
start_thread(print, "heterotrain-first").join()
if os.geteuid() == 0:  # the kernel does not limit root
    os.setresuid(61234, 61234, 61234)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    check_room()
except UsageError as error:
    print(error)
"""


def test_a_limit_of_the_kernel_is_named() -> None:
    found = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("\n" + SENTENCE), found


def test_an_attempt_to_connect_begins_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is left behind, and nothing was asked of the other ranks."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def at_most(thread: threading.Thread) -> None:
        if len(started) == CONNECTION_THREADS - 1:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", at_most)
    asked: list[str] = []
    with pytest.raises(UsageError) as found:
        Attempt(lambda: asked.append("connect"))
    assert str(found.value).startswith(SENTENCE)
    for thread in started:
        thread.join()
    assert asked == []


def test_a_thread_runs_one_thing_after_the_other_and_keeps_none_of_them() -> None:
    """Things that run at the same time have threads of their own."""
    found: list[threading.Thread] = []

    def once(gate: threading.Event) -> weakref.ref[threading.Event]:
        run_beside(lambda: (gate.wait(), found.append(threading.current_thread())), "heterotrain-test")
        return weakref.ref(gate)

    gates = [threading.Event(), threading.Event()]
    ended = [once(gate) for gate in gates]
    while gates:
        gates.pop().set()
    wait_until(lambda: not any(each() for each in ended), "both have ended and are forgotten", timeout_s=20.0)
    both = set(found)
    assert len(both) == 2
    once(gate := threading.Event())
    gate.set()
    wait_until(lambda: len(found) == 3, "the third has ended", timeout_s=20.0)
    assert set(found) == both
