"""Objects that a script may register: each mistake gives one clear message, at the wrong call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heterotrain
import numpy as np
import pytest
import torch
from heterotrain.checkpoints.storage import Storage
from heterotrain.data.sources import source_of
from heterotrain.errors import UsageError
from heterotrain.state import admission


class Plain(torch.nn.Module):
    """A model with one parameter."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter


def sgd(*shape: int) -> torch.optim.Optimizer:
    """Return an optimizer of a parameter of its own."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(shape))], lr=0.1)


LAYER = torch.nn.Linear(2, 1)
COMPLEX = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
MODELS = {
    r"takes a torch\.nn\.Module, not a function": lambda: sgd,
    r"the model is a DataParallel: give job\.wrap the model inside": lambda: torch.nn.DataParallel(LAYER),
    r"layer '0' is a Embedding with sparse": lambda: torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True)),
    r"parameter '0\.weight' has no shape yet": lambda: torch.nn.Sequential(torch.nn.LazyLinear(2)),
    r"parameter 'weight' is on the meta device": lambda: torch.nn.Linear(2, 1, device="meta"),
    r"parameter 'parameter' is complex": lambda: Plain(COMPLEX),
}


@pytest.mark.parametrize("message", MODELS)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_models_that_cannot_be_trained(message: str) -> None:
    """By the name of the layer or parameter."""
    with pytest.raises(UsageError, match=message):
        admission.check_model(MODELS[message]())


def test_all_models_that_torch_trains_are_accepted() -> None:
    """Shared parameters, frozen integer parameters, several formats."""
    model = torch.nn.ModuleDict({"one": LAYER, "again": LAYER, "dense": torch.nn.Embedding(2, 2).double()})
    model.register_parameter("count", torch.nn.Parameter(torch.zeros(1, dtype=torch.long), requires_grad=False))
    admission.check_model(model)
    admission.check_belongs(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


class Wrapper(torch.optim.Optimizer):
    """Takes the place of another optimizer, as Lookahead does, without the constructor of its class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults


def test_optimizers_and_schedulers_that_need_more_than_a_step() -> None:
    """A closure or a metric, and objects of another type."""
    for made, message in (
        ([], "not a list"),
        (torch.optim.LBFGS(LAYER.parameters()), r"LBFGS runs the model several times"),
        (torch.optim.SparseAdam(LAYER.parameters()), r"use torch\.optim\.Adam"),
        (Wrapper(sgd(1)), r"Wrapper does not call the constructor .* super\(\).__init__\(groups, defaults\)"),
    ):
        with pytest.raises(UsageError, match=message):
            admission.check_optimizer(made)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(1))
    for scheduler, message in ((plateau, r"job\.register\(name, scheduler\)"), (None, "not a NoneType")):
        with pytest.raises(UsageError, match=message):
            admission.check_scheduler(scheduler)


def test_parameters_outside_the_model() -> None:
    """An optimizer of another model would train nothing, or differently on each rank."""
    with pytest.raises(UsageError, match=r"1 of the 1 parameters of SGD are not in the model .*\(3, 2\)"):
        admission.check_belongs(LAYER, [sgd(3, 2)])


LOSSES: dict[str, Any] = {
    "not 0.5": 0.5,
    "not None": None,
    r"\(2, 1\): take its mean": torch.zeros(2, 1),
    "depends on no": torch.zeros(()),
}


@pytest.mark.parametrize("message", LOSSES)
def test_losses(message: str) -> None:
    """Losses that are not tensors, have several elements, or do not depend on the model."""
    with pytest.raises(UsageError, match=message):
        admission.check_loss(LOSSES[message])


def test_numbers() -> None:
    """Tensors of one element count as numbers; weights are at least 0; integers may be numpy's."""
    values = {"a": torch.ones(1, requires_grad=True), "b": np.float32(2), "c": 3}
    assert admission.plain_numbers("report", values) == {"a": 1.0, "b": 2.0, "c": 3.0}
    for bad, message in (
        (0.7, "takes numbers by name"),
        ({"a": "high"}, "a must be one number, not 'high'"),
        ({"b": torch.zeros(2)}, r"shape \(2,\)"),
    ):
        with pytest.raises(UsageError, match=message):
            admission.plain_numbers("report", bad)
    admission.check_weight(torch.tensor(0.0))
    for weight in (-1, float("inf"), torch.ones(2)):
        with pytest.raises(UsageError, match="of at least 0"):
            admission.check_weight(weight)
    assert admission.whole_number("seed", np.int64(3), least=0) == 3
    for number in (-1, 1.5, "3", True, float("nan")):
        with pytest.raises(UsageError, match="seed must be a whole number of at least 0, not"):
            admission.whole_number("seed", number, least=0)
    with pytest.raises(UsageError, match=r"seed must be a whole number below 2\^63, not"):
        admission.whole_number("seed", 2**63, least=0)


def test_objects_that_are_not_data_sets(tmp_path: Path) -> None:
    """A collection of data sets, and the path of one."""
    for given, message in (
        ({"train": [1], "test": [2]}, r"one of its values to job\.steps \('train', 'test'\)"),
        (tmp_path, "load it first"),
    ):
        with pytest.raises(UsageError, match=message):
            source_of(given, collate=None, shuffle=True, seed=0)


def test_a_file_as_checkpoint_folder(tmp_path: Path) -> None:
    """Reported at the start, not at the first checkpoint."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file: name a folder"):
        Storage(str(tmp_path / "file"))


def test_the_function_stays_a_function() -> None:
    """It is not replaced by a module of the same name, regardless of imports."""
    assert callable(heterotrain.fit)
    with pytest.raises(ModuleNotFoundError):
        __import__("heterotrain.fit")
