"""NCCL groups: connected in a thread that can be left, ended in threads that nobody has to wait for.

What torch's ``ProcessGroupNCCL`` does where a rank is lost (torch 2.15, ``torch/csrc/distributed/c10d``), and what
follows from it here (docs/adr/0035):

* ``abort`` waits for ``ncclCommAbort`` as long as that takes, and ``ncclCommAbort`` has hung in several releases of
  NCCL. Whoever cuts a group also answers the peers' heartbeats, so each abort has a thread of its own.
* ``abort`` ends only communicators that exist. One whose ``ncclCommInitRank`` has not returned is missed, so a connect
  that was left behind is aborted by its own thread as soon as it returns. Nonblocking communicators would not help:
  torch waits for them while it holds the lock that ``abort`` needs.
* ``Work.wait(timeout)`` counts from the start of the operation, and aborts the communicator when the time has passed.
  ``Work.wait()`` lets the current stream wait, and the host goes on.
* The watchdog sleeps for four times ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC`` (15 s) after an error, and the destructor
  waits for it. The monitor ends the process after 8 minutes. ``SETTINGS`` takes both out of the way of survivors.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.connection_attempt import Attempt

COLLECTIVE_S = 1800.0
"""Limit for operations. Long on purpose: heartbeats detect lost peers, and a slow rank is not lost."""
END_S = 2.0
"""Usual limit for the end of a communicator, which takes some tenths of a second. After it, nobody waits any longer."""

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog would end the process; here heartbeats reveal a loss
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # writes files, and sets the monitor on its way to end the process
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog's sleep after an error
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the monitor ends a process whose watchdog waits for an abort
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the training thread meets them too, and can say what they are
    "TORCH_NCCL_ENABLE_TIMING": "1",  # for ``length_s``
}
"""Torch's variables, each read by the constructor of a group. A user's own values take precedence."""

_c10d: Any = dist


def nccl_group(store: Any, name: str, *, rank: int, world_size: int) -> Any:
    """Make an NCCL group over keys of the store that begin with ``name``; ``join_nccl`` connects it."""
    for variable, value in SETTINGS.items():
        os.environ.setdefault(variable, value)
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_S)  # noqa: SLF001  # torch has no public way
    return _c10d.ProcessGroupNCCL(_c10d.PrefixStore(name, store), rank, world_size, options)


def join_nccl(group: Any, check: Callable[[], None]) -> None:
    """Let an NCCL group connect its ranks now, and not in the first backward pass.

    A rank that waits for a lost one inside NCCL cannot be woken. So it waits in a thread that can be left. When the
    call returns after all, that thread ends the communicator, which would otherwise keep device memory for ever.

    Args:
        group: of ``nccl_group``.
        check: called while waiting; may raise to abandon the attempt.

    Raises:
        PeerLost: a rank did not connect.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    connected, left = threading.Event(), threading.Event()

    def connect() -> None:
        group.eager_connect_single_device(device)
        connected.set()
        if left.is_set():
            _end(group.abort)

    try:
        Attempt(connect).result(check)
    except BaseException:
        left.set()
        if connected.is_set():  # just now: each side sets its own event before it looks at the other's
            abort([group], AbortFlag())  # nothing has been queued on it
        raise


def abort(groups: Sequence[Any], flag: AbortFlag) -> list[threading.Thread]:
    """Make all operations of NCCL groups fail, each in a thread of its own; returns at once.

    Args:
        groups: the groups.
        flag: raised first, so that a device that finds it down behind a sum has the whole sum.
    """
    flag.lift()
    return [_thread(group.abort) for group in groups]


def release(groups: list[Any], aborts: Sequence[threading.Thread]) -> None:
    """Free the communicators, streams and memory of groups, which the caller must not refer to any more.

    Waits ``END_S`` at most, which is enough unless NCCL hangs.

    Args:
        groups: emptied here.
        aborts: threads of ``abort``; none for groups whose operations have all ended, on all ranks.
    """
    shutdowns = [] if aborts else [_thread(group.shutdown) for group in groups]

    def drop() -> None:
        for thread in (*aborts, *shutdowns):
            thread.join()
        groups.clear()  # the destructor waits for the group's threads

    last, end_s = _thread(drop), time.monotonic() + END_S
    last.join(max(0.0, end_s - time.monotonic()))


def length_s(work: Any) -> float | None:
    """Return the seconds that a finished operation took on the device, its wait for the peers included.

    A callback of torch's that records the end would have to wait for it in a stream of its own. Streams share a few
    queues of the device, so that wait could hold up the backward pass behind it.

    Returns:
        ``None`` if the operation has not finished, or if the user has turned torch's clock for operations off.
    """
    try:
        return float(work._get_duration()) / 1e3  # noqa: SLF001  # torch has no public way
    except RuntimeError:
        return None


def _thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=_end, args=(run,), name="heterotrain-nccl", daemon=True)
    thread.start()
    return thread


def _end(run: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # the group is over in any case
        run()
