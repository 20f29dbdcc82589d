"""A training whose ranks get no more memory than a limit of the kernel allows, from their first step on."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from pathlib import Path

import heterotrain
import torch
from heterotrain.parts.memory import return_large_blocks

WIDTH, UNITS, SAMPLES = 1448, 6, 48
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 8
"""Bytes of the parameters of a unit."""
STACK_BYTES = 512 << 10


class Block(torch.nn.Module):
    """A residual block whose training state is much larger than everything else in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def model() -> torch.nn.Sequential:
    """Return all units."""
    return torch.nn.Sequential(*(Block() for _ in range(UNITS))).double()


def rows() -> torch.utils.data.TensorDataset:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand((2, SAMPLES, WIDTH), generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(values[0], values[1])


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over a batch."""
    return ((output - targets) ** 2).mean()


def optimizer_of(parameters: object) -> torch.optim.Optimizer:
    """Return AdamW, which makes its state in the first update."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=0.01)  # type: ignore[arg-type]  # an iterator


def small_stacks() -> None:
    """Let new threads of this process have small stacks, which count as memory of the process like its tensors."""
    threading.stack_size(STACK_BYTES)
    library = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(256)  # pthread_attr_t has 56 bytes with glibc on amd64
    library.pthread_attr_init(attributes)
    library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK_BYTES))
    assert library.pthread_setattr_default_np(attributes) == 0


def limit_memory(further_bytes: int) -> None:
    """Let the kernel refuse this process more than so many further bytes of private memory."""
    status = Path("/proc/self/status").read_text()
    (data_kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(data_kib) * 1024 + further_bytes, resource.RLIM_INFINITY))


def train(*, out: str, further_bytes: int = 0) -> None:
    """Train with AdamW, then write this rank's part of the final weights.

    ``further_bytes`` is what a rank may allocate from its first step on, after its parameters are there.
    """
    small_stacks()
    return_large_blocks()  # else freed blocks would count, too
    job = heterotrain.init()
    job.wrap(model)
    optimizer = job.optimizer(optimizer_of)
    limited = not further_bytes
    for step in job.steps(rows()):
        with step:
            if not limited:
                limit_memory(further_bytes)
                limited = True
            step.compute(loss_of)
            step.apply(optimizer)
    parts = {name: p.detach().clone() for name, p in job._training.layout.named_parameters()}  # a test
    torch.save(parts, f"{out}/{os.environ['HETEROTRAIN_WORKER']}.pt")
