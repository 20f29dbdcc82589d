"""Metrics of torchmetrics agree on all ranks, also through the loss of a worker between two of their exchanges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from distributed.conftest import operate, zygote  # noqa: F401  # fixtures
from distributed.harness import Operator, assert_same_weights, reference
from distributed.scripts import net, problem


@pytest.mark.parametrize("place", ["in a hook", "between collectives"])
def test_metrics_survive_the_loss_of_a_worker(operate: Callable[..., Operator], place: str) -> None:  # noqa: F811  # the fixture of that name
    """Inside a step, a metric over the batch is the step's loss; in a hook, one over a test set is that of one process.

    One rank has no samples; another one is lost when its metric is about to exchange its states.
    """
    pytest.importorskip("torchmetrics", reason="make test-all PART=guides installs it")
    operator = operate()
    fault = {"place": place, "step": 0 if place == "in a hook" else 3}
    workers = operator.start_workers(3, faults={2: fault}, script="guides.metric_script:train")
    operator.plan(workers, shares=(9, 0, 7), micro=(4, 0, 0))
    operator.finish(workers[:2])
    expected, _ = reference(epochs=2)
    x, y = problem(33).tensors
    model = net()
    model.load_state_dict(expected)
    last = float(((model(x) - y) ** 2).mean().detach())
    for worker in workers[:2]:
        assert worker.code == 0, worker.log()
        found = operator.weights(worker)
        values = found.pop("values")
        assert_same_weights(found, expected)
        assert values[-1].tolist() == pytest.approx([1, last], rel=1e-6)
        assert torch.isfinite(values).all()
