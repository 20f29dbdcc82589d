"""Training scripts that use more of the step's interface than a plain loop; each worker records what it saw."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import heterotrain
import torch
from distributed.fault_injectors import FaultInjector, install_faults
from distributed.scripts import FEATURES, begun, net, optimizer_of, problem, save
from heterotrain.exchange.interface import Exchange, Transfer
from support import passes


def watch(*, out: str, samples: int = 96, fault: dict[str, Any] | None = None, clip_norm: float | None = None) -> None:
    """Train and append a line for each event: results of steps and changes of the leader."""
    injector = FaultInjector(fault)
    record = Record(out)
    job = heterotrain.init()
    record.add("init", leads=job.is_leader)
    model = job.wrap(net())
    optimizer = job.optimizer(optimizer_of(model))
    install_faults(injector)

    @job.on_leader_change
    def changed(leads: bool) -> None:
        record.add("leader", leads=leads)

    @job.every_steps(5)
    def evaluate(steps: int) -> dict[str, float]:
        injector.at("hook", steps)
        data = problem(33)
        rows = sum(len(x) for x, _ in job.part(data, batch_samples=4))
        injector.at("hook's middle", steps)
        record.add("hook", steps=steps, rows=job.sum(rows=rows)["rows"], training=model.training)
        return {"rows": rows}

    for step in job.steps(problem(samples)):
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            result = step.apply(optimizer, clip_norm=clip_norm)
            record.add(
                "step", number=step.number, retry=step.is_retry, leads=job.is_leader, loss=result.loss,
                norm=result.gradient_norm, rate=result.learning_rate, samples=result.samples,
            )  # fmt: skip


class Record:
    """A file with one JSON line for each event, written at once, so that it survives the process."""

    def __init__(self, out: str) -> None:
        self._path = Path(out) / f"{os.environ['HETEROTRAIN_WORKER']}.events"

    def add(self, event: str, **values: Any) -> None:
        """Append an event."""
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event} | values) + "\n")


def events(out: Path, worker: str, event: str) -> list[dict[str, Any]]:
    """Return a worker's events of one kind, in their order."""
    lines = map(json.loads, (out / f"{worker}.events").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def several_passes(*, out: str, kind: str, fault: dict[str, Any] | None = None) -> None:
    """Train a GAN or by SAM (``kind``), and write the final weights."""
    injector = FaultInjector(fault)
    job = heterotrain.init()
    model: Any = job.wrap(passes.model())
    both = [job.optimizer(optimizer) for optimizer in passes.optimizers(model)]
    install_faults(injector)
    for step in job.steps(passes.data(90)):
        with step:
            passes.STEPS[kind](step, model, both, partial(_at, injector, step.number))
    save(model, out)


def _at(injector: FaultInjector, step: int, place: str) -> None:
    injector.at(place, step)


class HeadFirst(torch.nn.Module):
    """Registers its layers in another order than it computes them, in fp64, the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = torch.nn.Linear(16, 1)
        self.middle = torch.nn.Linear(16, 16)
        self.stem = torch.nn.Linear(FEATURES, 16)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer registered last first."""
        return torch.as_tensor(self.head(torch.tanh(self.middle(torch.tanh(self.stem(x))))))


def head_first(*, out: str, fault: dict[str, Any] | None = None) -> None:
    """Train ``HeadFirst``; record how many gradients had arrived when each bucket left, and write the weights."""
    record = Record(out)
    job, model, optimizer, injector = begun(HeadFirst(), fault)
    launch, left = Exchange._launch, list[int]()

    def launched(self: Exchange, transfer: Transfer) -> None:
        left.append(sum(parameter.grad is not None for parameter in model.parameters()))
        launch(self, transfer)

    Exchange._launch = launched  # type: ignore[method-assign]  # a deliberate wrapper
    for step in job.steps(problem(96)):
        left.clear()
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
            record.add("step", number=step.number, share=step.share_samples, left=left)
    save(model, out)


def dropping() -> torch.nn.Module:
    """Return a small model with dropout between its layers, in fp64."""
    layers = [torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 16)]
    return torch.nn.Sequential(*layers, torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)).double()


def compute(*, out: str, fault: dict[str, Any] | None = None) -> None:
    """Train by ``step.compute`` a model that is built without memory, and write the final weights."""
    injector = FaultInjector(fault)
    job = heterotrain.init()
    model = job.wrap(dropping)
    optimizer = job.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9))
    install_faults(injector)
    for step in job.steps(problem(96)):
        with step:
            injector.at("step", step.number)
            step.compute(torch.nn.functional.mse_loss)
            injector.at("computed", step.number)
            step.apply(optimizer, clip_norm=1.0)
    save(model, out)


def marks_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which samples count in the first loss, and which of them in the second."""
    first = x[:, :1] > 0.5
    return first, first & (x[:, 1:2] > 0.0)


def counted(*, out: str, fault: dict[str, Any] | None = None) -> None:
    """Train with two denominators, counted over all ranks first, without the micro-batches that have no mark."""
    job, model, optimizer, injector = begun(net(), fault)
    for step in job.steps(problem(96)):
        with step:
            injector.at("step", step.number)
            every = list(step.micro_batches())
            marks = [marks_of(x) for x, _ in every]
            count = job.sum(**{f"n{i}": float(sum(int(pair[i].sum()) for pair in marks)) for i in range(2)})
            for (x, y), (first, second) in zip(every, marks, strict=True):
                if not first.any():
                    step.skip_batch()
                    continue
                error = model(x) - y
                ratio = count["n0"] / max(1.0, count["n1"])
                step.backward((error**2 * first).sum() + ratio * (error.abs() * second).sum(), weight=int(first.sum()))
            step.apply(optimizer)
    save(model, out)


def summed(*, out: str, fault: dict[str, Any] | None = None) -> None:
    """Train with a sum over samples, which has no weight."""
    job, model, optimizer, _ = begun(net(), fault)
    for step in job.steps(problem(96)):
        with step:
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).sum())
            step.apply(optimizer)
