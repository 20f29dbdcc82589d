"""A training with metrics of torchmetrics, which exchange their states by collectives of their own."""

from __future__ import annotations

import os
from typing import Any

import torch
import torchmetrics  # type: ignore[import-not-found]  # an extra of these tests
from distributed.scripts import begun, net, problem


def train(*, out: str, fault: dict[str, Any] | None = None) -> None:
    """Compute a metric over all ranks in each step and in each hook; write weights and the hooks' values."""
    job, model, optimizer, injector = begun(net(), fault)
    values: dict[int, float] = {}

    @job.on_epoch_end
    def evaluate(epoch: int) -> None:
        metric = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        with torch.no_grad():
            for x, y in job.part(problem(33), batch_samples=4):
                metric.update(model(x), y)
        injector.at("in a hook", epoch)
        values[epoch] = float(metric.compute())

    for step in job.steps(problem(96)):
        metric = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                found = model(x)
                metric.update(found.detach(), y)
                step.backward(((found - y) ** 2).mean())
            injector.at("between collectives", step.number)
            seen = float(metric.compute())
            result = step.apply(optimizer)
            assert abs(seen - result.loss) < 1e-9 * (1 + result.loss)
    torch.save(model.state_dict() | {"values": torch.tensor(sorted(values.items()))}, f"{out}/{job.identity.worker}.pt")
    assert os.environ["HETEROTRAIN_WORKER"] == job.identity.worker
