"""Losses, gradients and weights that are not finite: all ranks act in the same step, and no such job succeeds."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from distributed.harness import Operator, Worker
from distributed.scripts import net, optimizer_of, problem
from heterotrain_core.contract.outcome import Ending

Operate = Callable[..., Operator]
BAD = 7
"""Number of the step that is not finite."""


def train(*, out: str, bad: str | None = None, always: bool = False, dtype: str = "float64") -> None:
    """Train a small model that something makes not finite in step ``BAD``, and record each step.

    Args:
        out: folder for weights and records.
        bad: what is not finite on this rank: ``loss``, ``gradient``, ``weights`` (in a hook), ``last weights`` (after
            the last step), ``statistics`` (of a buffer, with the loss); ``None`` for nothing.
        always: in step ``BAD`` and all later ones.
        dtype: type of model and data.
    """
    job = heterotrain.init()
    model = net().to(getattr(torch, dtype))
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    job.wrap(model)
    optimizer = job.optimizer(optimizer_of(model))
    steps = []

    @job.on_epoch_end
    def hook(epoch: int) -> None:
        if bad == "last weights" and epoch == job.config.epochs - 1:
            model[4].bias.fill_(math.nan)

    for step in job.steps(problem(96)):
        hit = step.number == BAD or (always and step.number > BAD)
        with step:
            for x, y in step.micro_batches():
                loss = ((model(x.to(model[0].weight.dtype)) - y) ** 2).mean()
                if hit and bad == "gradient":
                    loss = SpoiledGradient.apply(loss)
                if hit and bad in ("loss", "statistics"):
                    loss = loss * math.nan
                model.seen.add_(math.nan if hit and bad == "statistics" else 1.0)
                step.backward(loss)
            result = step.apply(optimizer)
        steps.append([step.number, result.skip_reason])
    stem = f"{out}/{os.environ['HETEROTRAIN_WORKER']}"
    torch.save(model.state_dict(), f"{stem}.pt")
    Path(f"{stem}.json").write_text(json.dumps(steps))


class SpoiledGradient(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(_context: Any, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return loss.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return NaN."""
        return gradient * math.nan


def run(operator: Operator, *bad: str | None, **arguments: object) -> list[Worker]:
    """Train with a rank for each of ``bad`` to the end."""
    script = "distributed.test_non_finite:train"
    workers = [operator.start(f"w{i}", script=script, bad=each, **arguments) for i, each in enumerate(bad)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    return workers


def reason(worker: Worker) -> str:
    """Return why a worker failed."""
    assert worker.outcome is not None
    assert (worker.code, worker.outcome.ending) == (1, Ending.FAILED), worker.log()
    return worker.outcome.reason


def test_one_rank_s_loss_fails_all_ranks_in_the_same_step(operate: Operate) -> None:
    """Each names the step, the rank and the last finite loss, and holds the weights from before the step."""
    workers = run(operate(), None, "loss", None)
    for worker in workers:
        assert f"NonFinite: the loss of step {BAD} is not finite on rank 1; the last finite loss was" in reason(worker)
        assert f"in step {BAD - 1}" in reason(worker)
        assert "Traceback" in worker.log()
        assert "steps/step" not in worker.log(), "frames of the library"
        assert worker.outcome is not None
        assert worker.outcome.step == BAD


def test_a_gradient_fails_all_ranks_in_the_same_step(operate: Operate) -> None:
    """The loss is finite on every rank."""
    for worker in run(operate(), "gradient", None):
        assert f"the loss of step {BAD} is finite, but the gradient of 0.weight is not" in reason(worker)


def test_skip_leaves_weights_and_buffers_as_they_were(operate: Operate) -> None:
    """All ranks skip the step; a statistic that the bad batch spoiled is taken back; training goes on."""
    operator = operate(on_non_finite="Skip")
    workers = run(operator, None, "statistics", "gradient")
    weights = [operator.weights(worker) for worker in workers]
    for worker, found in zip(workers, weights, strict=True):
        assert worker.code == 0, worker.log()
        steps = json.loads((operator.folder / f"{worker.name}.json").read_text())
        assert [number for number, why in steps if why] == [BAD]
        assert f"the loss of step {BAD} is not finite on rank 1" in steps[BAD][1]
        assert float(found["seen"]) == 11.0
        assert all(torch.equal(found[name], weights[0][name]) for name in found)
        assert all(bool(value.isfinite().all()) for value in found.values())
        assert f"the loss of step {BAD} is not finite on rank 1" in worker.log()


def test_skipping_ends(operate: Operate) -> None:
    """A job that only skips learns nothing, so it fails after a hundred steps."""
    for worker in run(operate(on_non_finite="Skip", epochs=40), None, "loss", always=True):
        assert f"the loss of step {BAD + 100} is not finite on rank 1" in reason(worker)
        assert "100 steps before it were skipped" in reason(worker)


def test_ignore_applies_the_step_and_does_not_succeed(operate: Operate) -> None:
    """As plain torch does, but a job with weights that are not finite never ends with success."""
    workers = run(operate(on_non_finite="Ignore"), None, "loss")
    for worker in workers:
        assert "the step is applied nevertheless" in worker.log()
        assert "the training is complete, but parameter 0.weight is not finite" in reason(worker)


@pytest.mark.parametrize("who", [("last weights", "last weights"), (None, "last weights")], ids=["all", "one"])
def test_weights_at_the_end_are_looked_at(operate: Operate, who: tuple[str | None, ...], tmp_path: Path) -> None:
    """No rank reports success, and no checkpoint of such weights takes the place of a good one."""
    operator = operate(checkpoint_uri=f"file://{tmp_path}/store")
    for worker in run(operator, *who):
        assert "the training is complete, but" in reason(worker)
    assert not list((tmp_path / "store").rglob("*.manifest*"))


def test_fp16_ends_when_the_loss_scale_cannot_fall(operate: Operate) -> None:
    """The scale is halved sixteen times; the next gradient that is not finite ends the training."""
    workers = run(operate(precision="FP16", epochs=20), None, "gradient", always=True, dtype="float32")
    for worker in workers:
        assert "fp16 has no smaller loss scale than 1: use precision BF16 or FP32" in reason(worker)
        step = int(reason(worker).split("the loss of step ")[1].split()[0])
        assert BAD < step <= BAD + 16
