"""A pipeline on devices of different speeds, emulated by waits, whose passes are recorded with the machine's clock."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import heterotrain
import torch
from distributed.pipeline_job_scripts import Decoder, loss_of, text
from heterotrain.layouts.neighbours import Neighbours
from heterotrain.layouts.stage import Stage


class _Wait(torch.autograd.Function):
    """Return the input after a wait; the gradient waits for twice as long."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Wait in proportion to the samples."""
        context.seconds = seconds
        time.sleep(seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Wait for twice as long."""
        time.sleep(2 * context.seconds * len(gradients[0]))
        return gradients[0], None


class Paced(torch.nn.Module):
    """A block, and the wait that makes it as slow as on the emulated device."""

    def __init__(self, block: torch.nn.Module, seconds: float) -> None:
        """Wrap a block that takes so many seconds for the forward pass of a sample."""
        super().__init__()
        self.block, self.seconds = block, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values after the block."""
        found: torch.Tensor = _Wait.apply(self.block(x), self.seconds)  # type: ignore[no-untyped-call]  # as torch
        return found


def train(*, out: str, blocks: int, sample_s: float, samples: int) -> None:
    """Train one epoch, and write a line for each committed step: when each of its passes computed.

    A line holds the step's number, this stage's first unit and the one after its last, the time when the step began,
    and its passes: whether it is a forward pass, begin and end, without waiting for neighbours. Times are those of the
    machine's clock in seconds.

    ``sample_s``: seconds of a block's forward pass for one sample on this device.
    """
    job = heterotrain.init()

    def build() -> torch.nn.Module:
        model = Decoder(blocks)
        model.blocks = torch.nn.ModuleList(Paced(block, sample_s) for block in model.blocks)
        return model

    job.wrap(build, units="blocks")
    optimizer = job.optimizer(torch.optim.AdamW)
    passes: list[tuple[bool, float, float]] = []
    units: list[int] = []
    received, sent = [0.0], [0.0]
    receive, send, forward, backward = Neighbours.receive, Neighbours.send, Stage._forward, Stage._backward

    def receiving(self: Neighbours, rank: int) -> torch.Tensor:
        found = receive(self, rank)
        received[0] = time.time()
        return found

    def sending(self: Neighbours, *arguments: Any) -> None:
        sent[0] = time.time()
        send(self, *arguments)

    def timed(what: Any, *, is_forward: bool) -> Any:
        def run(self: Stage, *arguments: Any) -> Any:
            units[:] = (self._part.start, self._part.stop)
            began = time.time()
            found = what(self, *arguments)
            ended = sent[0] if sent[0] > began else time.time()  # a backward pass may wait for messages after it
            passes.append((is_forward, max(began, received[0]), ended))
            return found

        return run

    Neighbours.receive, Neighbours.send = receiving, sending  # type: ignore[method-assign]  # a deliberate wrapper
    Stage._forward = timed(forward, is_forward=True)  # type: ignore[method-assign]  # a deliberate wrapper
    Stage._backward = timed(backward, is_forward=False)  # type: ignore[method-assign]  # a deliberate wrapper
    with Path(out, f"passes-{os.environ['HETEROTRAIN_WORKER']}.jsonl").open("w") as log:
        for step in job.steps(text(samples)):
            passes.clear()
            began_s = time.time()
            with step:
                step.compute(loss_of)
                step.apply(optimizer)
            if step.committed:
                log.write(json.dumps([step.number, *units, began_s, passes]) + "\n")
                log.flush()
