"""Threads that the limit of processes does not allow: one sentence, before gloo starts its own."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from heterotrain.errors import UsageError
from heterotrain.network.connection_attempt import Attempt
from heterotrain.network.threads import CONNECTION_THREADS

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
