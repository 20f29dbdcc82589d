"""torch's default group, made of a formation's connections, so that scripts can use ``torch.distributed`` as usual."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from heterotrain.errors import PeerLost, UsageError
from heterotrain.network.connection_setup import COLLECTIVE_S, GroupConnections, c10d, short_message

BACKEND = "heterotrain"
"""The name under which torch knows our gloo group for gradients."""


def check_free() -> None:
    """Refuse to begin where a script has made torch's default group itself.

    Raises:
        UsageError: it has.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed has a default group already, and job.steps makes its own: leave out init_process_group; inside "
            "job.steps torch.distributed works as usual"
        )


def publish(connections: GroupConnections, *, backend: str, rank: int, world_size: int) -> None:
    """Make the connections torch's default group; nothing is exchanged, since gloo's are there and NCCL's come later.

    Args:
        connections: of the new formation; there must be no default group.
        backend: ``gloo`` or ``nccl`` for the gradients on a device.
        rank: this rank in the formation.
        world_size: ranks in all.

    Raises:
        PeerLost: torch refused them.
    """
    _MADE.append(connections.gradients)
    try:
        if BACKEND not in c10d.Backend.backend_list:
            c10d.Backend.register_backend(BACKEND, lambda *_: _MADE[-1], devices=["cpu", "cuda"])
        dist.init_process_group(
            f"cuda:nccl,cpu:{BACKEND}" if backend == "nccl" else BACKEND,
            store=c10d.PrefixStore("default", connections.store), rank=rank, world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise PeerLost(f"the group could not be built: {short_message(error)}") from error
    finally:
        _MADE.clear()


_MADE: list[Any] = []
"""The group that torch is about to take over."""


def withdraw() -> None:
    """Drop torch's default group; waits for its threads."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


def abort_nccl() -> None:
    """Abort the gradients' communicator: unlike gloo, NCCL can be, from any thread."""
    with contextlib.suppress(Exception):  # whatever it says, the group is over
        c10d.group.WORLD._get_backend(torch.device("cuda")).abort()  # noqa: SLF001  # torch has no public way
