"""A checkpoint of a compiled model goes on without ``torch.compile``, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.checkpoints.export import read_weights
from heterotrain.session import Job
from support.one_process import DATA, squared_error


def trained(folder: Path, *, compiled: bool, epochs: int) -> tuple[Job, Any]:
    job = heterotrain.init(epochs=epochs, batch_samples=8, checkpoint_uri=str(folder))
    torch.manual_seed(1)
    layer: Any = torch.nn.Linear(2, 1).double()
    model = job.wrap(torch.compile(layer, backend="eager") if compiled else layer)
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)
    return job, layer


@pytest.mark.parametrize("first", [True, False])
def test_names_of_compiled_models_are_those_of_the_model(tmp_path: Path, first: bool) -> None:  # a case
    trained(tmp_path / "a", compiled=first, epochs=1)
    _, found = trained(tmp_path / "a", compiled=not first, epochs=2)
    _, expected = trained(tmp_path / "b", compiled=False, epochs=2)
    assert torch.equal(found.weight, expected.weight)
    assert set(read_weights(str(tmp_path / "a")).tensors) == {"weight", "bias"}
