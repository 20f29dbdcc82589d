"""Training scripts for the numerics of a step, and the same training in plain torch on one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import heterotrain
import torch
from distributed.fault_injectors import FaultInjector, install_faults
from distributed.training_setup import TrainingSetup
from heterotrain.data.order import permutation
from heterotrain.data.progress import micro_batches
from heterotrain.exchange.flat.reducer import Reducer
from heterotrain.exchange.interface import Exchange, Transfer
from heterotrain.network.control import StepDecision
from heterotrain.network.group import Group
from heterotrain.steps.agreement import Agreement
from heterotrain.steps.step import Step
from support.passes import perturb, put_back

torch.set_num_threads(1)  # as in the workers: several threads would slow these small models down


def train(
    *, out: str, setup: dict[str, Any] | None = None, fault: dict[str, Any] | None = None,
    rows: dict[str, int] | None = None, record: bool = False, by_sums: bool = False,
) -> None:  # fmt: skip
    """Train by the setup and write the weights and a record of each step.

    Args:
        out: folder for weights and records.
        setup: fields of ``TrainingSetup``.
        fault: as in ``fault_injectors.FaultInjector``; the place ``statistics`` is inside a layer that mixes samples.
        rows: largest number of rows in memory in ``forward`` and in ``backward``.
        record: whether to keep each bucket before and after the reduction.
        by_sums: whether statistics of layers are sums of the formation, as with NCCL.
    """
    if by_sums:
        Group.sums_on_device = property(lambda _group: True)  # type: ignore[assignment]  # for this process
    training, injector = TrainingSetup(**(setup or {})), FaultInjector(fault)
    steps, buckets = _watch_steps(), _watch_buckets() if record else []
    job = heterotrain.init(batch_norm="local" if training.local else "global")
    model = training.model()
    if rows:
        model.insert(len(model) - 1, Memory(**rows))
    job.wrap(model)
    optimizer = job.optimizer(training.optimizer(model))
    if training.decay != 1.0:
        job.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, training.decay))
    install_faults(injector)
    running = [0]

    def mixes(*_: object) -> None:  # what a hook returns takes the place of the input
        injector.at("statistics", running[0])

    for layer in model:
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.register_forward_pre_hook(mixes)
    formats = set()
    for step in job.steps(Streamed(training.data()) if training.stream else training.data()):
        with step:
            running[0] = step.number
            injector.at("step", step.number)
            clips = {"clip_norm": training.clip_norm, "clip_value": training.clip_value}
            moved = []
            for more in (True, False) if training.passes != "one" else (False,):
                for x, y in step.micro_batches(more=more):
                    formats.add(str(model[0](x).dtype))
                    total, weight = training.loss(model, x, y, step.number)
                    if training.tokens or training.error == "classes":
                        step.backward(total, weight=weight)
                    else:
                        step.backward(total / weight)
                if more and training.passes == "ascent":
                    moved = perturb(model)
                    continue
                put_back(moved)
                step.apply(optimizer, **clips)
    stem = f"{out}/{os.environ['HETEROTRAIN_WORKER']}"
    torch.save(model.state_dict(), f"{stem}.pt")
    torch.save(buckets, f"{stem}.buckets")
    Path(f"{stem}.json").write_text(json.dumps({"steps": steps, "formats": sorted(formats)}))


class Streamed(torch.utils.data.IterableDataset[tuple[torch.Tensor, ...]]):
    """The samples as an iterator, in the same order as from a data set with indices."""

    def __init__(self, samples: torch.utils.data.TensorDataset) -> None:
        self._samples = samples
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        order = permutation(seed=0, epoch=self._epoch, epoch_samples=len(self._samples), shuffle=True)
        return (self._samples[index] for index in order.tolist())


class Memory(torch.nn.Module):
    """A layer that runs out of memory above a number of rows."""

    def __init__(self, *, forward: int = 1 << 30, backward: int = 1 << 30) -> None:
        super().__init__()
        self._rows = (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self._rows[0]:
            raise torch.OutOfMemoryError("too many rows in forward")
        result: torch.Tensor = _Held.apply(x, self._rows[1])
        return result


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = rows
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if len(gradients[0]) > ctx.rows:
            raise torch.OutOfMemoryError("too many rows in backward")
        return gradients[0], None


def _watch_steps() -> list[dict[str, Any]]:
    """Return a list that gets an entry for each committed step."""
    found: list[dict[str, Any]] = []
    commit = Agreement.commit

    def watched(self: Agreement, step: Step, decision: StepDecision) -> None:
        loss_scale, before = step.numerics.loss_scale, step.numerics.state_dict()
        commit(self, step, decision)
        found.append({
            "step": step.number, "loss": decision.loss, "skipped": step.skipped, "loss_scale": loss_scale,
            "rate": step.numerics.learning_rate_scale, "numerics": before,
        })  # fmt: skip

    Agreement.commit = watched  # type: ignore[method-assign]  # a deliberate wrapper
    return found


def _watch_buckets() -> list[dict[str, list[torch.Tensor]]]:
    """Return a list that gets this rank's own and the reduced buckets of each attempt."""
    found: list[dict[str, list[torch.Tensor]]] = []
    arm, launch, wait = Reducer.arm, Exchange._launch, Reducer.wait

    def armed(self: Reducer, group: Any) -> None:
        found.append({"own": [], "sum": [], "packed": []})
        arm(self, group)

    def launched(self: Exchange, transfer: Transfer) -> None:
        found[-1]["own"].append(transfer.bucket.flat.clone())
        launch(self, transfer)
        packed = getattr(self, "_packed", {})
        found[-1]["packed"].append(torch.tensor(transfer.bucket in packed))

    def waited(self: Reducer) -> None:
        wait(self)
        found[-1]["sum"] = [flat.clone() for flat in self.flats]

    Reducer.arm, Exchange._launch, Reducer.wait = armed, launched, waited  # type: ignore[method-assign]  # a deliberate wrapper
    return found


# -- the same in one process ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Twin:
    """The result of plain torch."""

    weights: dict[str, torch.Tensor]
    losses: list[float] = field(default_factory=list)


def twin(
    setup: TrainingSetup, *, epochs: int, batch: Callable[[int], int] = lambda _epoch: 16,
    rate: Callable[[int, torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], float] | None = None,
    schedule: Callable[[int], int] = lambda _epoch: 1,
) -> Twin:  # fmt: skip
    """Train by the setup on whole batches.

    Args:
        setup: the training's setup.
        epochs: number of epochs.
        batch: global batch of an epoch.
        rate: factor on the learning rate, from step, model, optimizer and data before the step; 0 skips the step.
        schedule: steps of the scheduler for each step of an epoch.
    """
    model = setup.model()
    optimizer = setup.optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, setup.decay)
    result = Twin(weights={})
    for number, (epoch, x, y) in enumerate(batches(setup, epochs=epochs, batch=batch)):
        factor = rate(number, model, optimizer, x, y) if rate else 1.0
        moved = []
        if setup.passes != "one":
            _backward(setup, model, x, y, number)
            if setup.passes == "ascent":
                moved = perturb(model)
            else:
                _clip(setup, model)
                optimizer.step()
        result.losses.append(_backward(setup, model, x, y, number))
        put_back(moved)
        _clip(setup, model)
        own = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = own * factor
        if factor == 0:
            optimizer.zero_grad()  # a step without gradients changes nothing, not even momentum
        optimizer.step()
        optimizer.param_groups[0]["lr"] = own
        for _ in range(schedule(epoch)):
            scheduler.step()
    result.weights = {name: value.detach() for name, value in model.state_dict().items()}
    return result


def _backward(setup: TrainingSetup, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, number: int) -> float:
    """Compute the gradients of a whole batch; return its loss."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setup.autocast):
        total, weight = setup.loss(model, x, y, number)
    (total / weight).backward()
    return float(total.detach()) / weight


def _clip(setup: TrainingSetup, model: torch.nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.cat([g.flatten() for g in gradients]).norm())
    for gradient in gradients:
        if setup.clip_norm is not None and norm > setup.clip_norm:
            gradient.mul_(setup.clip_norm / norm)
        if setup.clip_value is not None:
            gradient.clamp_(-setup.clip_value, setup.clip_value)


def batches(
    setup: TrainingSetup, *, epochs: int, batch: Callable[[int], int]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield epoch, x and y of each step."""
    x, y = setup.data().tensors
    for epoch in range(epochs):
        order = permutation(seed=0, epoch=epoch, epoch_samples=setup.samples, shuffle=True).tolist()
        for start in range(0, setup.samples, batch(epoch)):
            chosen = order[start : start + batch(epoch)]
            yield epoch, x[chosen], y[chosen]


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference over all tensors."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-300))
        for name, value in expected.items()
    )


def cuts(shares: tuple[int, ...], micro: tuple[int, ...]) -> list[int]:
    """Return the sizes of all ranks' micro-batches, in the order of the step's samples."""
    return [size for share, most in zip(shares, micro, strict=True) for size in micro_batches(share, most)]
