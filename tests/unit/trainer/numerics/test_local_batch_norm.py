"""BatchNorm over each micro-batch: running statistics do not depend on the division of the batch."""

from __future__ import annotations

import copy
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain import UsageError
from heterotrain.forward_state.state import ForwardState
from heterotrain.numerics.local_batch_norm import localise
from torch import nn


def a_state(model: nn.Module) -> ForwardState:
    state = ForwardState()
    state.use(model)
    return state


def finish(state: ForwardState) -> None:
    state.start(None)
    state.finish()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (4, 3)),
        (nn.BatchNorm2d(3, momentum=None), (4, 3, 2, 2)),
        (nn.InstanceNorm1d(3, track_running_stats=True), (4, 3, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_micro_batch_changes_the_statistics_as_torch_does(layer: Any, shape: tuple[int, ...]) -> None:
    """Over several steps, and with the momentum of an average over all steps."""
    torch.manual_seed(0)
    plain, ours = layer.double(), copy.deepcopy(layer).double()
    localise(ours)
    state = a_state(ours)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64)
        state.begin()
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-12, atol=1e-12)
        state.take(4)
        finish(state)
        torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=0)


def test_micro_batches_count_with_their_samples_and_only_once_a_step() -> None:
    """Two micro-batches of 6 and 2 samples give one update by the mean of their statistics."""
    layer = nn.BatchNorm1d(2, momentum=0.5).double()
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    localise(layer)
    state = a_state(layer)
    state.begin()
    for part in (x[:6], x[6:]):
        layer(part)
        state.take(len(part))
    assert layer.running_mean.tolist() == [0.0, 0.0], "nothing changes before the step has a result"
    finish(state)
    torch.testing.assert_close(layer.running_mean, 0.5 * x.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(layer.running_var, 0.5 + 0.5 * (0.75 * x[:6].var(0) + 0.25 * x[6:].var(0)))
    assert layer.num_batches_tracked.item() == 1


def test_layers_in_eval_mode_keep_their_statistics() -> None:
    """Frozen layers do not change by a bit, and their steps are not counted."""
    layer = nn.BatchNorm1d(2).eval()
    layer.running_mean.fill_(0.1)
    before = copy.deepcopy(layer.state_dict())
    state = a_state(layer)
    state.begin()
    layer(torch.ones(4, 2))
    state.take(4)
    finish(state)
    torch.testing.assert_close(dict(layer.state_dict()), dict(before), rtol=0, atol=0)


def test_layers_that_exchange_statistics_by_themselves_are_refused_by_name() -> None:
    """They would wait for ranks that have fewer micro-batches."""
    with pytest.raises(UsageError, match=r"layer '0' is a SyncBatchNorm.*batch_norm='global'"):
        localise(nn.Sequential(nn.SyncBatchNorm(2)))


@pytest.mark.parametrize(("mode", "micro_batch"), [("global", None), ("local", None), ("local", 3)])
def test_a_job_with_batch_norm_trains_through_a_step_of_one_sample(mode: str, micro_batch: int | None) -> None:
    """19 of 20 samples leave one for the epoch's last step; locally, the share is cut into 1, 3, 3, … as well."""
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
    job = heterotrain.init(epochs=2, batch_samples=19, batch_norm=mode, micro_batch_samples=micro_batch)
    model = job.wrap(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in job.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        with step:
            for a, b in step.micro_batches():
                step.backward(((model(a) - b) ** 2).mean())
            losses.append((step.batch_samples, step.apply(optimizer).loss))
    assert [samples for samples, _ in losses] == [19, 1, 19, 1]
    assert losses[2][1] < losses[0][1]
    assert model[1].num_batches_tracked.item() == 2, "one sample has no variance, and leaves the statistics as they are"


def test_a_share_that_is_cut_names_local_statistics_as_the_remedy() -> None:
    """With statistics over the global batch it stays refused."""
    job = heterotrain.init(batch_samples=8, micro_batch_samples=4)
    model = job.wrap(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def loop() -> None:
        for step in job.steps(torch.utils.data.TensorDataset(torch.randn(20, 2))):
            with step:
                for (x,) in step.micro_batches():
                    step.backward(model(x).mean())

    with pytest.raises(UsageError, match=r"init\(batch_norm='local'\)"):
        loop()
