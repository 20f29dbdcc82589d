"""Training scripts that end in the middle of the training, in a process that lives on."""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

import heterotrain
import torch
from distributed.scripts import net, optimizer_of, problem

FAILING_STEP = 3


def train(*, out: str, end: str = "") -> None:
    """Train, then write the final weights.

    Args:
        out: folder for the weights.
        end: how the script ends in ``FAILING_STEP``: ``raise`` or ``exit``; empty for not at all. The process then
            lives until the file ``release`` exists, as one whose threads do not end.
    """

    def hold(*_error: object) -> None:
        while not Path(f"{out}/release").exists():
            time.sleep(0.01)

    if end == "raise":
        sys.excepthook = hold  # replaces the interpreter's, which heterotrain calls after its own work
    job = heterotrain.init()
    if end == "exit":
        atexit.register(hold)
    model = job.wrap(net())
    optimizer = job.optimizer(optimizer_of(model))
    kept = [job.steps(problem(96))]  # the traceback of an exception keeps this generator alive
    for step in kept[0] if end == "raise" else kept.pop():
        with step:
            if step.number == FAILING_STEP and end == "raise":
                raise ValueError("no such file")
            if step.number == FAILING_STEP and end == "exit":
                sys.exit(3)
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
    torch.save(model.state_dict(), f"{out}/{os.environ['HETEROTRAIN_WORKER']}.pt")
