"""A training script whose messages between the ranks of a member are large enough to show a link's bandwidth."""

from __future__ import annotations

import time

import heterotrain
import torch

WIDTH = 256


def train(*, out: str, samples: int) -> None:  # every script gets a folder
    """Train a sequence of layers."""
    job = heterotrain.init()
    job.wrap(lambda: torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    optimizer = job.optimizer(lambda params: torch.optim.SGD(params, lr=1e-4))
    rows = torch.ones(samples, 8, WIDTH)
    for step in job.steps(torch.utils.data.TensorDataset(rows, rows)):
        with step:
            step.compute(torch.nn.functional.mse_loss)
            step.apply(optimizer)
        time.sleep(0.01)
