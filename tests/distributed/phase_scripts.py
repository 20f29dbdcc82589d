"""A script with two loops of ``job.steps``: another data set, thawed layers and another rate in the second one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from distributed.scripts import begun, net, optimizer_of, problem
from heterotrain.data.order import permutation
from torch.utils.data import TensorDataset

FIRST, SECOND = 96, 80
RATE = 0.005


def later(samples: int) -> TensorDataset:
    """Return the data of the second phase."""
    x, y = problem(samples).tensors
    return TensorDataset(x.flip(0) * 0.5, y.flip(0))


def frozen() -> torch.nn.Sequential:
    """Return the model of the first phase, whose first layer is not trained."""
    model: Any = net()
    model[0].requires_grad_(requires_grad=False)
    return model  # type: ignore[no-any-return]  # a sequence of layers


def thaw(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Do what comes between the phases."""
    model[0].requires_grad_()
    for group in optimizer.param_groups:
        group["lr"] = RATE


def train(
    *, out: str, fault: dict[str, Any] | None = None, phases: list[dict[str, int]], stop: int | None = None,
    **settings: Any,
) -> None:  # fmt: skip
    """Train in two phases, and write the weights and the calls of hooks.

    Args:
        out: folder for both.
        fault: as in ``fault_injectors.FaultInjector``; the place ``between`` is between the phases.
        phases: arguments of the two calls of ``job.steps``.
        stop: number of the step at which the script fails.
        settings: arguments of ``heterotrain.init``.
    """
    calls = []
    job, model, optimizer, injector = begun(frozen(), fault, **settings)
    job.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97))

    @job.on_epoch_end
    def epoch_hook(epoch: int) -> None:
        calls.append(f"epoch {epoch}")

    @job.every_steps(4)
    def steps_hook(committed: int) -> None:
        calls.append(f"steps {committed}")

    for number, data in enumerate((problem(FIRST), later(SECOND))):
        if number:
            injector.at("between", 0)
            thaw(model, optimizer)
        for step in job.steps(data, **phases[number]):
            with step:
                injector.at("step", step.number)
                for x, y in step.micro_batches():
                    step.backward(((model(x) - y) ** 2).mean())
                step.apply(optimizer)
            if step.number == stop:
                raise SystemExit("stopped")
    name = os.environ.get("HETEROTRAIN_WORKER") or f"rank-{os.environ.get('RANK', '0')}"
    torch.save(model.state_dict(), f"{out}/{name}.pt")
    Path(f"{out}/{name}.json").write_text(json.dumps(calls))


def batches(phase: int, epochs: Iterator[int], steps: int | None) -> Iterator[torch.Tensor]:
    """Yield the samples of each step of a phase, which may end in an epoch."""
    for epoch in epochs:
        order = permutation(seed=0, epoch=epoch, epoch_samples=SECOND if phase else FIRST, shuffle=True)
        for chosen in torch.as_tensor(order).split(16):
            if steps == 0:
                return
            yield chosen
            steps = None if steps is None else steps - 1


def plain(*, epochs: tuple[int, ...], steps: tuple[int | None, ...] = (None, None)) -> dict[str, torch.Tensor]:
    """Return the weights of the same training in plain PyTorch; ``epochs`` that each phase begins, and its steps."""
    model, begun = frozen(), 0
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for phase, data in enumerate((problem(FIRST), later(SECOND))):
        if phase:
            thaw(model, optimizer)
        x, y = data.tensors
        for chosen in batches(phase, iter(range(begun, begun + epochs[phase])), steps[phase]):
            optimizer.zero_grad()
            ((model(x[chosen]) - y[chosen]) ** 2).mean().backward()
            optimizer.step()
            scheduler.step()
        begun += epochs[phase]
    return dict(model.state_dict())
