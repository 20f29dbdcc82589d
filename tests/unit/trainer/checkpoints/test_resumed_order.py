"""A training continues in the order in which its epoch began, or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.errors import UsageError

pytestmark = pytest.mark.usefixtures("own_process")


def train(
    folder: Path, *, stop_in: int | None = None, shuffle: bool = True, seed: int = 0, samples: int = 24
) -> list[int]:
    """Train for two epochs of three steps, or until SIGTERM in one step; return the samples in their order."""
    job = heterotrain.init(batch_samples=8, epochs=2, seed=seed, checkpoint_uri=folder)
    model = job.wrap(torch.nn.Linear(1, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ids: list[int] = []
    for step in job.steps(torch.utils.data.TensorDataset(torch.ones(samples, 1)), shuffle=shuffle):
        with step:
            if step.number == stop_in:
                os.kill(os.getpid(), signal.SIGTERM)
            for (x,) in step.micro_batches():
                step.backward(model(x).mean())
            step.apply(optimizer)
        ids += step.task.ids
    return ids


def stopped(folder: Path, *, in_step: int, **options: Any) -> None:
    """Leave a checkpoint after a step."""
    with pytest.raises(SystemExit):
        train(folder, stop_in=in_step, **options)


@pytest.mark.parametrize("other", [{"seed": 1}, {"shuffle": False}, {"samples": 25}, {"samples": 20}])
def test_another_order_is_refused_in_the_middle_of_an_epoch(tmp_path: Path, other: dict[str, Any]) -> None:
    """Samples would be lost and repeated; the same order continues."""
    stopped(tmp_path, in_step=1)
    with pytest.raises(
        UsageError, match=r"in the middle of an epoch whose order of samples is 'feistel-.* with seed 0 of 24 samples'"
    ):
        train(tmp_path, **other)
    assert len(train(tmp_path)) == 32


def test_another_order_may_begin_with_an_epoch(tmp_path: Path) -> None:
    """Each epoch still covers the data set."""
    stopped(tmp_path, in_step=2)
    assert sorted(train(tmp_path, seed=1)) == list(range(24))
