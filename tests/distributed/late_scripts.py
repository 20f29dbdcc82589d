"""A training script that changes model and optimizer itself, while a step waits to be confirmed."""

from __future__ import annotations

import os
from typing import Any

import heterotrain
import torch
from distributed.fault_injectors import FaultInjector, install_faults
from distributed.queued_updates import queue_updates
from distributed.scripts import FEATURES, optimizer_of, problem

THAWED_AT = 3


class Net(torch.nn.Module):
    """A model with a buffer of the script, and a layer that it thaws."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(FEATURES, 16), torch.nn.Linear(16, 1)
        self.register_buffer("total", torch.zeros(()))
        self.double()
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x).tanh() * (1.0 + 0.01 * self.total))
        return y


class Count:
    """Counts the steps of a script."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def before(model: Net, number: int) -> None:
    """Thaw a layer."""
    if number == THAWED_AT:
        model.first.requires_grad_(True)


def after(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Change a buffer and the learning rate."""
    model.total.add_(model.last.weight.detach().sum())
    optimizer.param_groups[0]["lr"] *= 0.9


def train(*, out: str, fault: dict[str, Any] | None = None, counts: bool = False) -> None:
    """Train, and write the final state; with ``counts``, that of a registered object, too."""
    injector = FaultInjector(fault)
    job = heterotrain.init()
    model: Any = job.wrap(Net())
    optimizer = job.optimizer(optimizer_of(model, fused=True))
    count = job.register("count", Count()) if counts else Count()
    install_faults(injector)
    queue_updates(injector)
    for step in job.steps(problem(96), confirm="late"):
        before(model, step.number)
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            injector.at("backward", step.number)
            step.apply(optimizer)
            injector.at("applied", step.number)
            after(model, optimizer)
            count.steps += 1
    steps = {"count": torch.tensor(float(count.steps if counts else 6))}
    torch.save(model.state_dict() | steps, f"{out}/{os.environ['HETEROTRAIN_WORKER']}.pt")
