"""What runs in processes of its own: a call that stays inside NCCL for ever would hold up the tests' process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pynvml
import torch
from heterotrain.errors import PeerLost
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.connection_setup import c10d
from heterotrain.network.nccl import abort, join_nccl, nccl_group, release
from heterotrain.network.sums import NcclSum


def connected(name: str) -> Any:
    """Return a group of this rank alone."""
    group = nccl_group(c10d.HashStore(), name, rank=0, world_size=1)
    join_nccl(group, lambda: None)
    return group


def used_bytes() -> int:
    """Return this process's memory on its card; other tests share the card.

    Where the driver does not list the process, as from inside some containers, that of all processes.
    """
    try:
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    except pynvml.NVMLError as error:
        print(f"the driver does not say what each process uses: {error}", flush=True)
    free, every = torch.cuda.mem_get_info()
    return every - free


def left_behind(*, out: str) -> None:
    """Leave a connect whose second rank never comes, then connect and sum in another group."""
    torch.cuda.set_device(0)
    looks = 0

    def lose() -> None:
        nonlocal looks
        looks += 1
        if looks > 50:
            raise PeerLost("a peer is lost")

    waiting = nccl_group(c10d.HashStore(), "waiting", rank=0, world_size=2)
    try:
        join_nccl(waiting, lose)
    except PeerLost:
        Path(out, "left").touch()
    group, ones = connected("next"), torch.ones(3, device="cuda")
    group.allreduce([ones], c10d.AllreduceOptions()).wait()
    assert ones.tolist() == [1.0] * 3
    Path(out, "summed").touch()


def many_formations(*, out: str) -> None:
    """Make and release groups, every other one by an abort; fail if memory or threads are left."""
    torch.cuda.set_device(0)

    def form(number: int) -> None:
        group, flat = connected(f"{number}"), torch.ones(1 << 20, device="cuda")
        work = group.allreduce([flat], c10d.AllreduceOptions())
        if number % 2:
            aborts = abort([group], AbortFlag())
            NcclSum(work).settle()
        else:
            work.wait()
            torch.cuda.synchronize()
            aborts = []
        groups = [group]
        del group, work
        release(groups, aborts)

    def held() -> tuple[int, int]:
        torch.cuda.empty_cache()
        return used_bytes(), len(list(Path("/proc/self/task").iterdir()))

    form(0)
    form(1)  # what the first of each kind leaves for all later ones
    before_bytes, threads = held()
    for number in range(20):
        form(number)
    end_s = time.monotonic() + 60
    while held()[1] > threads and time.monotonic() < end_s:
        time.sleep(0.05)
    now_bytes, now_threads = held()
    assert now_threads <= threads, [thread.name for thread in threading.enumerate()]
    assert now_bytes - before_bytes < 8 << 20, f"{(now_bytes - before_bytes) >> 20} MiB are left"
    Path(out, "released").touch()
