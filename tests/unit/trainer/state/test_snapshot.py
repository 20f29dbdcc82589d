"""A hook's changes are undone, except for those of the weights, which are an error."""

from __future__ import annotations

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.state.snapshot import Snapshot
from heterotrain.state.training import TrainState


def a_training() -> TrainState:
    """Return a script's state after a step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    training = TrainState(model=model, optimizers=[optimizer])
    training.extras["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
    training.extras["average"] = torch.optim.swa_utils.AveragedModel(model)
    return training


def test_everything_that_hooks_step_is_restored() -> None:
    """Registered objects, learning rates and groups, layers, frozen parameters and buffers."""
    training = a_training()
    model, optimizer = training.model, training.optimizers[0]
    assert isinstance(model, torch.nn.Sequential)
    wanted = training.flat()
    kept = [tensor.clone() for tensor in wanted.tensors]
    before, layers = Snapshot(training), list(model)
    parameters = [list(group["params"]) for group in optimizer.param_groups]
    for _ in range(3):
        training.extras["plateau"].step(1.0)  # type: ignore[attr-defined]  # a scheduler
    training.extras["average"].update_parameters(model)  # type: ignore[attr-defined]  # an average
    model[1].running_mean.add_(1.0)
    model[2] = torch.nn.Linear(4, 1)
    model.append(torch.nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    model[0].requires_grad_(requires_grad=False)
    before.restore()
    assert all(a is b for a, b in zip(model, layers, strict=True))
    for group, earlier in zip(optimizer.param_groups, parameters, strict=True):
        assert all(a is b for a, b in zip(group["params"], earlier, strict=True))
    assert all(p.requires_grad for p in model.parameters())
    found = training.flat()
    assert found.skeleton == wanted.skeleton
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, kept, strict=True))


def test_other_weights_are_refused_unless_they_are_back() -> None:
    """An average may take the weights' place for an evaluation."""
    training = a_training()
    assert training.model is not None
    weight = next(training.model.parameters())
    own = weight.detach().clone()
    before = Snapshot(training)
    weight.data.mul_(2.0)
    with pytest.raises(UsageError, match="finally"):
        before.restore()
    weight.data.copy_(own)
    before.restore()
