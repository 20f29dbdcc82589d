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
"""The name under which torch knows the trainer's gloo group for gradients."""


def check_free() -> None:
    """Refuse to start when the script has already made torch's default group.

    Raises:
        UsageError: there is a default group.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed already has a default group, and job.steps makes its own: leave out init_process_group; "
            "inside job.steps torch.distributed works as usual"
        )


def publish(connections: GroupConnections, *, backend: str, rank: int, world_size: int) -> None:
    """Make the connections torch's default group.

    Nothing is exchanged: gloo's connections exist already, and NCCL's are made later.

    Args:
        connections: those of the new formation; there must be no default group.
        backend: ``gloo`` or ``nccl`` for the gradients on a device.
        rank: this rank in the formation.
        world_size: number of ranks.

    Raises:
        PeerLost: torch rejected the connections.
    """
    _MADE.append(connections.gradients)
    try:
        if BACKEND not in c10d.Backend.backend_list:
            c10d.Backend.register_backend(BACKEND, lambda *_: _MADE[-1], devices=["cpu", "cuda"])
        dist.init_process_group(
            f"cuda:nccl,cpu:{BACKEND}" if backend == "nccl" else BACKEND,
            store=c10d.PrefixStore("default", connections.store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
    except (RuntimeError, ValueError) as error:
        raise PeerLost(f"the group could not be built: {short_message(error)}") from error
    finally:
        _MADE.clear()


_MADE: list[Any] = []
"""The group that torch is about to take over, if any."""


def withdraw() -> None:
    """Drop torch's default group. Waits for its threads."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


def abort_nccl() -> None:
    """Abort the gradients' communicator: unlike gloo, NCCL can be aborted, from any thread."""
    with contextlib.suppress(Exception):  # the group is over in any case
        c10d.group.WORLD._get_backend(torch.device("cuda")).abort()  # noqa: SLF001  # torch has no public way
