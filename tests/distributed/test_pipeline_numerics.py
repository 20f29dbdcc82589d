"""What a stage computes with: means and random numbers of micro-batches, number formats, gradients not finite."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from distributed.harness import Operator, Worker
from distributed.pipeline_job_scripts import Block, Decoder, text
from heterotrain.data.order import permutation
from heterotrain.numerics.precision import DTYPES
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of
from heterotrain_core.contract.choices import Precision
from torch.nn import functional as F  # noqa: N812  # the usual name

Operate = Callable[..., Operator]
BLOCKS, BATCH, STEPS = 4, 17, 3
UNITS = BLOCKS + 2
BAD = 1
"""Number of the step that is not finite."""
MEMBERS = (((3,), 8, 3), ((2, 5), 5, 2), ((), 4, 2))
"""Cuts, share and largest micro-batch: two pipelines and a whole model."""
SIZES = ((2, 3, 3), (1, 2, 2), (2, 2))
"""Their micro-batches."""


class Spoiled(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(_context: Any, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight."""
        return weight.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return infinity."""
        return gradient * torch.inf


class Spoiling(Block):
    """A block whose first weight alone gets a gradient that is not finite, in step ``BAD``."""

    step = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values after the block."""
        weight = Spoiled.apply(self.inner.weight) if Spoiling.step == BAD else self.inner.weight
        return x + self.drop(self.outer(torch.tanh(F.linear(x, weight, self.inner.bias))))


def decoder(*, dropout: float, dtype: str, spoils: int | None = None) -> torch.nn.Module:
    """Return a decoder; ``spoils`` is the block that spoils its gradient."""
    model = Decoder(BLOCKS, dropout)
    if spoils is not None:
        model.blocks[spoils] = Spoiling(dropout)
    return model.to(getattr(torch, dtype))


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over samples, without a weight."""
    return F.cross_entropy(scores.mT, targets)


def train(*, out: str, **kind: Any) -> None:
    """Train and write this rank's part of the weights, the losses and the reasons of skipped steps."""
    job = heterotrain.init()
    job.wrap(lambda: decoder(**kind), units="blocks")
    optimizer = job.optimizer(lambda params: torch.optim.AdamW(params, lr=0.02, eps=0.01))
    steps = []
    for step in job.steps(text(BATCH * STEPS)):
        Spoiling.step = step.number
        with step:
            step.compute(loss_of)
            result = step.apply(optimizer, clip_norm=0.5)
        steps.append([result.loss, result.skip_reason])
    own = {name: p.detach().clone() for name, p in job._training.layout.named_parameters()}  # a test
    stem = f"{out}/{os.environ['HETEROTRAIN_WORKER']}"
    torch.save(own, f"{stem}.pt")
    Path(f"{stem}.json").write_text(json.dumps(steps))


def one_process(
    *, precision: str = "FP32", scale: float = 1.0, **kind: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Take the same steps in plain torch, in the same micro-batches; return weights and losses.

    The seeds of dropout are those of the members' samples in the step. ``scale`` is a factor on the loss.
    """
    units = units_of(built(lambda: decoder(**kind)), "blocks")
    InitialValues(seed=0, device=torch.device("cpu")).fill(units)
    draws = UnitDraws(units, seed=0, device=torch.device("cpu"))
    model, (x, y) = units.model, text(BATCH * STEPS).tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=0.01)
    order = permutation(seed=0, epoch=0, epoch_samples=BATCH * STEPS, shuffle=True)
    dtype, losses = DTYPES.get(Precision(precision)), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total, start = 0.0, 0
        for size in (size for sizes in SIZES for size in sizes):
            chosen = order[step * BATCH + start : step * BATCH + start + size].tolist()
            with draws.at(step, start), nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = loss_of(model(x[chosen]), y[chosen])
            loss = loss.float() if dtype is not None else loss
            loss.backward(loss.new_full((), scale * size / BATCH))
            total, start = total + float(loss.detach()) * size / BATCH, start + size
        losses.append(total)
        if kind.get("spoils") is not None and step == BAD:
            continue
        gradients = [p.grad.div_(scale) for p in model.parameters() if p.grad is not None]
        norm = torch.stack([(gradient**2).sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.5 / float(norm)))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def run(operator: Operator, *, is_cut: bool = True, **kind: Any) -> list[list[Worker]]:
    """Train with all members to the end; return their workers."""
    script = "distributed.test_pipeline_numerics:train"
    wanted = [(cuts if is_cut else (), share, micro) for cuts, share, micro in MEMBERS]
    members = [
        [operator.start(f"w{number}{stage}", script=script, **kind) for stage in range(len(cuts) + 1)]
        for number, (cuts, _, _) in enumerate(wanted)
    ]
    operator.until_ready(*[worker for member in members for worker in member])
    operator.plan_members([(member, *rest) for member, rest in zip(members, wanted, strict=True)])
    operator.finish([worker for member in members for worker in member])
    return members


def check(
    operator: Operator, members: list[list[Worker]], expected: dict[str, torch.Tensor], tolerance: float
) -> list[list[Any]]:
    """Check the weights of all ranks against those of one process; return the first rank's record of steps."""
    for worker in (worker for member in members for worker in member):
        assert worker.code == 0, operator.evidence()
        for name, part in torch.load(operator.folder / f"{worker.name}.pt", weights_only=True).items():
            difference = float((part - expected[name]).norm() / expected[name].norm())
            assert difference < tolerance, f"{worker.name}: {name} differs by {difference:.2e}"
    steps: list[list[Any]] = json.loads((operator.folder / "w00.json").read_text())
    return steps


@pytest.mark.parametrize("parallelism", ["Pipeline", "Data"])
def test_losses_that_are_means_and_dropout(operate: Operate, parallelism: str) -> None:
    """A mean counts with its micro-batch's samples, and random numbers follow the samples' place in the step."""
    kind = {"dropout": 0.3, "dtype": "float64"}
    operator = operate(batch_samples=BATCH, epochs=1, parallelism=parallelism)
    expected, losses = one_process(**kind)
    steps = check(operator, run(operator, is_cut=parallelism == "Pipeline", **kind), expected, 1e-10)
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize(("precision", "scale"), [("BF16", 1.0), ("FP16", 2.0**16)])
def test_number_formats_of_stages(operate: Operate, precision: str, scale: float) -> None:
    """Stages round like one process in the same format; the loss is scaled in FP16, and gradients are scaled back."""
    kind = {"dropout": 0.0, "dtype": "float32"}
    operator = operate(batch_samples=BATCH, epochs=1, parallelism="Pipeline", precision=precision)
    expected, _ = one_process(precision=precision, scale=scale, **kind)
    exact, _ = one_process(**kind)
    rounded = max(float((exact[name] - value).norm() / value.norm()) for name, value in expected.items())
    tolerance = 1e-5
    assert rounded > 2 * tolerance, "the format makes a difference that the test would find"
    steps = check(operator, run(operator, **kind), expected, tolerance)
    assert not any(reason for _, reason in steps)


@pytest.mark.parametrize("spoils", [0, 3])
def test_a_gradient_of_one_stage_that_is_not_finite_is_skipped_by_all(operate: Operate, spoils: int) -> None:
    """The loss is finite, and so are the gradients of all other stages."""
    kind = {"dropout": 0.0, "dtype": "float64", "spoils": spoils}
    operator = operate(batch_samples=BATCH, epochs=1, parallelism="Pipeline", on_non_finite="Skip")
    expected, _ = one_process(**kind)
    steps = check(operator, run(operator, **kind), expected, 1e-10)
    assert [bool(reason) for _, reason in steps] == [number == BAD for number in range(STEPS)]
