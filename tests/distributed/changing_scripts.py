"""Training scripts whose models change state in their forward passes, and gradients by hooks."""

from __future__ import annotations

import os
from typing import Any

import heterotrain
import torch
from distributed.fault_injectors import FaultInjector, install_faults
from distributed.scripts import optimizer_of, problem
from support.changing_layers import Everything


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    """Limit a gradient, where a factor on it would make a difference."""
    return gradient.clamp(-0.5, 0.5)


def everything(*, out: str, fault: dict[str, Any] | None = None) -> None:
    """Train a model with all kinds of such layers, and write its final state."""
    injector = FaultInjector(fault)
    job = heterotrain.init()
    model: Any = job.wrap(Everything())
    Everything.declare(job)
    model.head.weight.register_hook(clamp)
    optimizer = job.optimizer(optimizer_of(model))
    install_faults(injector)
    for step in job.steps(problem(96)):
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
    torch.save(model.state_dict(), f"{out}/{os.environ['HETEROTRAIN_WORKER']}.pt")
