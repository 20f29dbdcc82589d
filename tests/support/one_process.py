"""A job in one process, as on a laptop: the library's own code without peers."""

from __future__ import annotations

from typing import Any

import heterotrain
import torch
from heterotrain.session import Job

X = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(20, 2)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True) ** 2)


def a_job(**settings: Any) -> tuple[Job, torch.nn.Module, torch.optim.Optimizer]:
    """Return a job with a linear model in fp64, two epochs and 8 samples a step, if ``settings`` name no others."""
    job = heterotrain.init(**({"epochs": 2, "batch_samples": 8} | settings))
    torch.manual_seed(1)
    model = job.wrap(torch.nn.Linear(2, 1).double())
    return job, model, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def squared_error(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of a batch."""
    return ((model(x) - y) ** 2).mean()
