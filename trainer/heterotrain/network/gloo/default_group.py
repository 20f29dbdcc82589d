"""torch's default group, made for each formation, so that scripts can use the collectives of ``torch.distributed``.

What a script may do, and where:

* Collectives of the default group, synchronous or with ``async_op=True``, on tensors of any device, and the collectives
  of objects: inside ``with step:`` before ``step.apply``, and in hooks. There the loss of a worker repeats the step, or
  the hook, with the remaining ranks. Everywhere else they are refused with one sentence (``ScriptCollectives.run``).
* They travel over gloo on every device, and never touch the connections of the gradients.
* Groups of a script's own (``new_group``), and messages between two ranks (``send``, ``recv``), are refused.
* A call that other ranks answer with another one, or with ``step.apply``, ends in an error that names both.

In the forward pass every rank has to make the same calls although shares differ: ``docs/training-loop.md``.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group as register  # torch has no public way
from torch._C._distributed_c10d import _unregister_process_group as unregister

from heterotrain.errors import PeerLost, UsageError
from heterotrain.network.connection_attempt import short_message
from heterotrain.network.connection_setup import c10d
from heterotrain.network.gloo.script_group import NO_SUBGROUPS, NoStore, ScriptCollectives, ScriptGroup
from heterotrain.network.nccl import COLLECTIVE_S

BACKEND = "heterotrain"
"""The name under which torch knows the default group's backend."""


def check_free() -> None:
    """Refuse to start when the script has already made torch's default group.

    Raises:
        UsageError: there is a default group.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed already has a default group, and job.steps makes its own: leave out "
            "init_process_group; inside `with step:` and in hooks the collectives of torch.distributed work"
        )


def publish(carrier: ScriptCollectives, *, rank: int, world_size: int) -> None:
    """Make torch's default group. Nothing is exchanged.

    Args:
        carrier: runs the collectives in the new formation; there must be no default group.
        rank: this rank in the formation.
        world_size: number of ranks.

    Raises:
        PeerLost: torch rejected the group.
    """
    _MADE.append(ScriptGroup(carrier, rank=rank, world_size=world_size))
    try:
        if BACKEND not in c10d.Backend.backend_list:
            c10d.Backend.register_backend(BACKEND, lambda *_: _made(), devices=["cpu", "cuda"])
        dist.init_process_group(
            BACKEND, store=_NO_STORE, rank=rank, world_size=world_size, timeout=timedelta(seconds=COLLECTIVE_S)
        )
    except (RuntimeError, ValueError) as error:
        raise PeerLost(f"the group could not be built: {short_message(error)}") from error
    finally:
        _MADE.clear()


_NO_STORE = NoStore()
"""Kept, because torch holds the C++ part of a store only."""
_MADE: list[Any] = []
"""The group that torch is about to take over, if any."""


def _made() -> ScriptGroup:
    if not _MADE:
        raise UsageError(NO_SUBGROUPS)
    return _MADE[-1]  # type: ignore[no-any-return]  # the list holds nothing else


def withdraw() -> None:
    """Drop torch's default group, if it was made: the connections before it may have failed."""
    if not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group()
    for group in _KEPT:  # torch forgets the names of all groups together with the default one, unless that failed
        unregister(group.group_name)
        register(group.group_name, group)


_KEPT: list[Any] = []
"""Groups that live longer than the default one."""


def outlive(group: Any) -> None:
    """Let torch find a group of our own by its ``group_name``, whatever becomes of the default group."""
    _KEPT.append(group)
    register(group.group_name, group)
