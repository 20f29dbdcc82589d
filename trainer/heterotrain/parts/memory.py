"""Measures the memory that a rank may use for its part of the model, as the layout planner needs it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import torch

LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where the kernel shows the limit of this container: control groups version 2 and 1."""
USABLE_PERCENT = 85
"""The allocator's gaps, temporary tensors and buffers of the network take the rest."""
LARGE_BLOCK_BYTES = 128 << 10
"""A block of at least this size gets pages of its own: glibc's first value."""
_M_MMAP_THRESHOLD, _M_MMAP_MAX = -3, -4
"""Parameters of glibc's ``mallopt``."""
_MOST_BLOCKS = 65536
"""Blocks with pages of their own; glibc's default."""


def usable_bytes(device: torch.device, *, ranks: int, limits: Sequence[Path] = LIMITS) -> int:
    """Return the bytes that this rank may use for training state and activations; at least 1.

    On a CPU that is the container's limit, or the host's memory, divided among the ranks, without what this process
    uses already. Libraries that are mapped from files do not count: the kernel drops such pages when memory is short.
    Half of the rest is left for copies of the state, which an accelerator has in the host's memory: the one from which
    a checkpoint is written, and the parts that arrive when the model is cut differently.

    Args:
        device: of this rank.
        ranks: processes that share the container's memory.
        limits: files with the container's limit.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(1, free * USABLE_PERCENT // 100)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            whole = min(whole, int(path.read_text()))
        except (OSError, ValueError):  # there is none, or "max"
            continue
    return max(1, (whole * USABLE_PERCENT // 100 // ranks - _own_bytes()) // 2)


def leave_out_what_is_loaded() -> None:
    """Leave all objects that exist now out of later collections: modules, and what the script has made so far.

    A collection looks at every object, and PyTorch alone has some 300,000, which takes 0.2 s of processor time. All
    ranks wait for it where a plan cuts the model elsewhere. Objects still end with their last reference.
    """
    gc.collect()
    gc.freeze()


def return_large_blocks() -> None:
    """Let glibc return large blocks of memory to the host as soon as they are freed, in this process from now on.

    By default it keeps freed blocks of up to 32 MiB, and the trainer's image lets it keep all. Gathered units then
    leave holes between tensors that stay, and a rank of a divided model may need more memory than with the whole model.
    The price is that the kernel clears the pages of each new block.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries have none
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, _MOST_BLOCKS)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)  # also ends its adaptation to what is freed


def give_back(device: torch.device) -> None:
    """Give memory that nothing uses any more back to the host or the device, after a part of the model was dropped."""
    gc.collect()  # a model's hooks refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed blocks
    if trim is not None:
        trim(0)


def _own_bytes() -> int:
    """Return the memory that only this process has, without pages of files."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    except (OSError, ValueError, IndexError):  # not Linux
        return 0
