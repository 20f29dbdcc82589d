"""Training scripts that end the training by ``job.finish`` on some ranks or on all of them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import heterotrain
import torch
from distributed.scripts import net, optimizer_of, problem


def train(*, out: str, where: str, ranks: Collection[int], at: int, kind: str = "plain") -> None:
    """Train, end after ``at`` steps, and write the number of committed steps and the weights.

    Args:
        out: folder for both.
        where: place of the call: ``before`` the backward pass of step ``at - 1``, ``after`` it, ``epoch`` or ``steps``
            for a hook.
        ranks: those that make the call.
        at: steps after which the training ends.
        kind: ``norm`` for a model whose ranks wait for each other in forward, ``sum`` for a script that exchanges data
            in each step, ``passes`` for one with two passes a step, else ``plain``.
    """
    job = heterotrain.init(epochs=4, batch_samples=16)
    model = job.wrap(
        torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double() if kind == "norm" else net()
    )
    optimizer = job.optimizer(optimizer_of(model))
    own = int(os.environ.get("RANK", "0"))

    def end(place: str, steps: int) -> None:
        if (place, steps) == (where, at) and own in ranks:
            job.finish(f"rank {own} is content")

    @job.on_epoch_end
    def epoch_hook(epoch: int) -> None:
        end("epoch", 6 * (epoch + 1))

    @job.every_steps(1)
    def steps_hook(committed: int) -> None:
        end("steps", committed)

    for step in job.steps(problem(96)):
        with step:
            end("before", step.number + 1)
            for more in (True, False) if kind == "passes" else (False,):
                for x, y in step.micro_batches(more=more):
                    step.backward(((model(x) - y) ** 2).mean())
                if kind == "sum":
                    job.sum(one=1.0)
                step.apply(optimizer)
        if step.committed:
            end("after", step.number + 1)
            Path(f"{out}/steps-{own}").write_text(str(step.number + 1))
    state = {name: value.double() for name, value in model.state_dict().items()}
    torch.save(state, f"{out}/weights-{own}.pt")
