"""A peak of large blocks, such as pages of a list or arrays of an allocation, is returned to the host."""

from __future__ import annotations

import subprocess
import sys

import pytest

PEAK = """
import ctypes, ctypes.util, sys, threading
from pathlib import Path

from heterotrain_operator.engine.native_memory import return_freed_memory

if ctypes.util.find_library("c") is None or not hasattr(ctypes.CDLL(None), "mallopt"):
    sys.exit("no glibc")
if "returns" in sys.argv:
    return_freed_memory()

def own_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024

def peak(kept):
    bytearray(30 << 20)  # glibc keeps blocks of this size from now on
    large = []
    for _ in range(100):
        large.append(bytearray(1 << 20))
        kept.append(bytearray(2000))  # between the large blocks
    for block in large:
        block[::4096] = bytes(256)

before, kept = own_mib(), []
thread = threading.Thread(target=peak, args=(kept,))
thread.start()
thread.join()
print(own_mib() - before)
"""


def kept_mib(*arguments: str) -> float:
    """Return the MiB that a process keeps after a peak of 100 MiB in a thread."""
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=False)
    if "no glibc" in done.stderr:
        pytest.skip("this system has another C library than glibc")
    return float(done.stdout)


def test_freed_memory_is_returned() -> None:
    by_default, returned = kept_mib(), kept_mib("returns")
    assert by_default > 50, "the test can tell"
    assert returned < 10
