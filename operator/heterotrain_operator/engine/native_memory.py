"""What the C library keeps of freed memory: little, because peaks of lists and allocations are rare and short."""

from __future__ import annotations

import ctypes

ARENAS = 1
"""Heaps of the C library. By default, each thread that computes has one, and keeps what it once used."""
LARGE_BLOCK_BYTES = 256 << 10
"""A block of at least this size gets pages of its own, and returns them when it is freed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's ``mallopt``."""


def return_freed_memory() -> None:
    """Let glibc return freed memory to the host, in this process from now on; call it before threads start.

    By default it keeps freed blocks of up to 32 MiB, such as pages of lists and arrays of an allocation, and each
    thread has its own. Small objects of Python are not concerned.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries have none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)  # also ends its adaptation to what is freed
        mallopt(_M_TRIM_THRESHOLD, LARGE_BLOCK_BYTES)
