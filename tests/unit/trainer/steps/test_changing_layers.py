"""State that layers change in forward, in the steps of a job in one process."""

from __future__ import annotations

from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.data.order import permutation
from heterotrain.errors import RepeatStep
from support.changing_layers import FEATURES, Everything

X = torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True) ** 2)


def plain(*, passes: int) -> dict[str, torch.Tensor]:
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        order = torch.as_tensor(permutation(seed=0, epoch=epoch, epoch_samples=20, shuffle=True))
        for chosen in order.split(8):
            x, y = (column[chosen] for column in DATA.tensors)
            for _ in range(passes):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_micro_batches_passes_and_repeated_steps_leave_no_trace(passes: int, fails: bool) -> None:
    """Steps 0 and 3 fail once after all their forward passes; a pass without ``step.apply`` counts nevertheless."""
    job = heterotrain.init(epochs=2, batch_samples=8, micro_batch_samples=3)
    model: Any = job.wrap(Everything())
    Everything.declare(job)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    failed: set[int] = set()
    for step in job.steps(DATA):
        with step:
            for number in range(1, passes + 1):
                for x, y in step.micro_batches(more=number < passes):
                    step.backward(((model(x) - y) ** 2).mean())
            if fails and step.number in (0, 3) and step.number not in failed:
                failed.add(step.number)
                raise RepeatStep("injected")
            step.apply(optimizer)
    assert failed == ({0, 3} if fails else set())
    torch.testing.assert_close(dict(model.state_dict()), plain(passes=passes), rtol=1e-10, atol=1e-12)
