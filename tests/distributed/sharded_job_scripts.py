"""Training scripts for workers whose ranks divide the model: the same script as for whole models."""

from __future__ import annotations

import os
import time
from typing import Any

import heterotrain
import torch
from distributed.fault_injectors import FaultInjector, install_faults
from distributed.scripts import net, problem
from heterotrain.state import local

RARE = 0.8
"""Samples whose first value is above it use a rare layer."""


class Rare(torch.nn.Module):
    """A layer that few samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the samples, of which a few have changed."""
        chosen = (x[:, 0] > RARE).nonzero().flatten()
        return x.index_add(0, chosen, self.linear(x[chosen])) if chosen.numel() else x


def net_of(*, rare: bool = False) -> torch.nn.Module:
    """Return a small model; with ``rare`` it has layers that few samples use."""
    layers = list(net())
    if rare:
        layers[2:2] = [torch.nn.Sequential(Rare(), torch.nn.Linear(16, 16), Rare()).double()]
    return torch.nn.Sequential(*layers)


def train(
    *, out: str, samples: int = 96, fault: dict[str, Any] | None = None, micro: int | None = None,
    clip_norm: float | None = None, options: dict[str, Any] | None = None, lockstep: bool = False,
    slow_s: float = 0.0, finish_at: int | None = None,
    rare: bool = False,
) -> None:  # fmt: skip
    """Train with AdamW, made by a function, then write this rank's part of the final weights.

    ``micro`` is the largest micro-batch of a rank; ``options`` are those of ``job.wrap``; ``slow_s`` lengthens each
    micro-batch; ``finish_at`` is the step after whose result the script ends the training; ``rare`` is of the model.
    """
    injector = FaultInjector(fault)
    job = heterotrain.init(micro_batch_samples=micro)
    model = job.wrap(net_of(rare=rare), **(options or {}))
    optimizer = job.optimizer(lambda params: torch.optim.AdamW(params, lr=0.02, eps=0.01))
    install_faults(injector)
    losses: list[float] = []

    @job.on_epoch_end
    def evaluate(epoch: int) -> dict[str, float]:
        injector.at("in a hook", epoch)
        seen = wrong = 0.0
        for x, y in job.part(problem(13), batch_samples=2):
            seen += len(x)
            wrong += float(((model(x) - y) ** 2).sum())
        found = job.sum(seen=seen, wrong=wrong)
        losses.append(found["wrong"])
        assert found["seen"] == 13
        return {"error": found["wrong"] / found["seen"]}

    for step in job.steps(problem(samples), lockstep=lockstep):
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                injector.at("in forward", step.number)
                time.sleep(slow_s)
                step.backward(((model(x) - y) ** 2).mean())
            injector.at("backward", step.number)
            step.apply(optimizer, clip_norm=clip_norm)
            if step.number == finish_at:
                job.finish("that is enough")
            injector.at("applied", step.number)
    parts = {name: (local.range_of(name, p), local.local(p)) for name, p in model.named_parameters()}
    found = {name: (place.start, place.stop, part.reshape(-1).clone()) for name, (place, part) in parts.items()}
    where = f"{out}/{os.environ['HETEROTRAIN_WORKER']}-{os.environ['HETEROTRAIN_LOCAL_RANK']}.pt"
    torch.save({"parts": found, "losses": losses}, where)
