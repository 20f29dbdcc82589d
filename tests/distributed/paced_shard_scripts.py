"""A sharded member on devices of different speeds, emulated by waits, which records steps, messages and memory."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import heterotrain
import torch
from distributed.paced_scripts import Paced
from heterotrain.parts.unequal import gathered_unit
from heterotrain.parts.unequal.part_messages import PartExchange, sum_of_parts
from heterotrain.parts.unequal.unit_passes import UnitPasses

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


class _Link:
    """Lets exchanges take as long as over a slow link, one after the other.

    An exchange takes the time of the busiest rank's messages. Where a unit is gathered ahead, it takes that time from
    the moment in which it begins.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.waited_s = 0.0
        self._bytes_per_s, self._free_s = bytes_per_s, 0.0

    def install(self) -> None:
        """Put this link between the ranks of this process's member."""
        link = self

        class Slow(PartExchange):
            def __init__(self, group: Any, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
                super().__init__(group, sent, received)
                self.ends_s = link.begin(received)  # this rank's own part is among them

            def finish(self) -> None:
                began_s = time.time()
                super().finish()
                link.wait(began_s, self.ends_s)

        def slow_sum(group: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
            began_s, ends_s = time.time(), link.begin(parts)
            found = sum_of_parts(group, parts)
            link.wait(began_s, ends_s)
            return found

        gathered_unit.PartExchange = Slow  # type: ignore[misc]  # a deliberate wrapper
        gathered_unit.sum_of_parts = slow_sum

    def begin(self, parts: Sequence[torch.Tensor]) -> float:
        """Return when an exchange is over that begins now; each rank has one of the parts."""
        largest = max(part.nbytes for part in parts)
        self._free_s = max(time.time(), self._free_s) + (len(parts) - 1) * largest / self._bytes_per_s
        return self._free_s

    def wait(self, began_s: float, ends_s: float) -> None:
        """Wait for the end of an exchange, and note the time since the wait for it began."""
        time.sleep(max(0.0, ends_s - time.time()))
        self.waited_s += time.time() - began_s


def train(
    *, out: str, width: int, units: int, sample_s: float, samples: int, link_bytes_per_s: float, ahead: bool = True
) -> None:
    """Train a sequence of layers, and write a line for each committed step.

    A line holds the weights by which the plan divides the state, or its cuts for stages, the time when the step
    began, the seconds of its waiting for messages inside the member, the step's peak of the process's memory
    (VmHWM) in bytes, without what the process took before it had a model, and the bytes of parameters, gradients
    and optimizer state that this rank holds.

    ``sample_s``: seconds of a layer's forward pass for one sample on this device. ``link_bytes_per_s``: an exchange of
    messages waits until the busiest rank's would have passed over such a link. ``ahead``: units are gathered while the
    unit before them computes.
    """
    torch.set_num_threads(1)
    job = heterotrain.init()
    before = _memory("VmRSS")
    job.wrap(
        lambda: torch.nn.Sequential(*(Paced(Unit(width), sample_s) for _ in range(units)))
    )  # fmt: skip
    optimizer = job.optimizer(lambda params: torch.optim.Adam(params, lr=1e-4))
    link = _Link(link_bytes_per_s)
    link.install()
    if not ahead:
        UnitPasses._begin_gathering = lambda *_: None  # type: ignore[method-assign]  # a deliberate wrapper
    rows = torch.randn(64, TOKENS, width, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows, rows.flip(0))

    class Repeated(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> Any:
            return data[index % len(data)]

    with Path(out, f"steps-{os.environ['HETEROTRAIN_WORKER']}.jsonl").open("w") as log:
        for step in job.steps(Repeated()):
            began_s, link.waited_s = time.time(), 0.0
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
                layout = None if group is None else group.member.layout
                weights = [] if layout is None else list(layout.state_weights or layout.cuts)
                log.write(json.dumps([weights, began_s, link.waited_s, _memory("VmHWM") - before, held]) + "\n")
                log.flush()
