"""In place of Horovod, which does not build with present versions of PyTorch (0.28.1 is its last release).

The functions that the guide's script uses, with Horovod's signatures and meaning, on gloo. Gradients are averaged
before ``step``. It shows what the guide says of the port, and nothing about Horovod itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def init() -> None:
    """Connect to the other processes that the launcher has started."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group(
        "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
    )


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank()


def local_rank() -> int:
    """Return its rank on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def size() -> int:
    """Return the number of processes."""
    return dist.get_world_size()


def allreduce(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:  # Horovod's signature
    """Return the mean over all processes."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / size()


def broadcast_parameters(state: Mapping[str, torch.Tensor], root_rank: int) -> None:
    """Give every process the values of one."""
    for tensor in state.values():
        dist.broadcast(tensor, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Do it with an optimizer's state."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                dist.broadcast(value, root_rank)


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
) -> torch.optim.Optimizer:
    """Return the optimizer with gradients averaged before each step."""
    parameters = [parameter for _, parameter in named_parameters]

    def average(*_: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(allreduce(parameter.grad))

    optimizer.register_step_pre_hook(average)
    return optimizer
