"""A sharded member on devices of different speeds, emulated by waits, which records steps, messages and memory."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import heterotrain
import torch
from distributed.paced_scripts import Paced
from heterotrain.layouts.gathered_unit import GatheredUnit

TOKENS = 64
"""Vectors of a sample: activations are these times as large as a vector."""


def _memory(what: str) -> int:
    """Return a figure of this process's memory in bytes."""
    (found,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024


class Unit(torch.nn.Module):
    """A layer with many parameters and activations for the work that it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the first vector into all of them."""
        return torch.tanh(x + self.inner(x[:, :1]))


def train(*, out: str, width: int, units: int, sample_s: float, samples: int, link_bytes_per_s: float) -> None:
    """Train a sequence of layers, and write a line for each committed step.

    A line holds the weights by which the plan divides the state, the time when the step began, the seconds of its
    messages inside the member, the step's peak of the process's memory (VmHWM) in bytes, without what the process took
    before it had a model, and the bytes of parameters, gradients and optimizer state that this rank holds.

    ``sample_s``: seconds of a layer's forward pass for one sample on this device. ``link_bytes_per_s``: an exchange of
    messages waits until the busiest rank's would have passed over such a link.
    """
    torch.set_num_threads(1)
    job = heterotrain.init()
    before = _memory("VmRSS")
    job.wrap(
        lambda: torch.nn.Sequential(*(Paced(Unit(width), sample_s) for _ in range(units)))
    )  # fmt: skip
    optimizer = job.optimizer(lambda params: torch.optim.Adam(params, lr=1e-4))
    messages, exchange = [0.0], GatheredUnit._exchange

    def timed(self: GatheredUnit, *arguments: Any) -> None:
        began = time.time()
        exchange(self, *arguments)
        largest = max(tensor.nbytes for tensors in arguments for tensor in tensors)
        time.sleep(max(0.0, began + (self.group.size() - 1) * largest / link_bytes_per_s - time.time()))
        messages[0] += time.time() - began

    GatheredUnit._exchange = timed  # type: ignore[method-assign]  # a deliberate wrapper
    rows = torch.randn(64, TOKENS, width, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows, rows.flip(0))

    class Repeated(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> Any:
            return data[index % len(data)]

    with Path(out, f"steps-{os.environ['HETEROTRAIN_WORKER']}.jsonl").open("w") as log:
        for step in job.steps(Repeated()):
            began_s, messages[0] = time.time(), 0.0
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            with step:
                step.compute(torch.nn.functional.mse_loss)
                step.apply(optimizer)
            if step.committed:
                own = dict(job._training.layout.named_parameters()).values()  # a measurement
                held = sum(p.nbytes for p in own) * 2 + sum(
                    value.nbytes for p in own for value in optimizer.state[p].values() if value.dim()
                )
                group = job._loop.active_group  # a measurement
                weights = [] if group is None else list(group.member.layout.state_weights)
                log.write(json.dumps([weights, began_s, messages[0], _memory("VmHWM") - before, held]) + "\n")
                log.flush()
