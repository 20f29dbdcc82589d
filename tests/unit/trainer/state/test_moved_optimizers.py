"""Optimizers whose parameters are replaced, against ones that had them from the beginning."""

from __future__ import annotations

import torch
from heterotrain.state.moved_optimizers import MovedOptimizer


def whole() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


def grouped(model: torch.nn.Module) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    biases = [p for name, p in named.items() if name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": biases}], lr=0.1)


def held(model: torch.nn.Module, *layers: int) -> dict[str, torch.nn.Parameter]:
    """Return copies with values of some layers' parameters, by their names in the whole model."""
    generator = torch.Generator().manual_seed(1)
    names = [name for name, _ in model.named_parameters() if int(name[0]) in layers]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return {name: torch.nn.Parameter(torch.randn(shapes[name], generator=generator)) for name in names}


def step(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_group_holds_its_own_parameters_of_any_part() -> None:
    model = whole()
    optimizer = grouped(model)
    moved = MovedOptimizer(optimizer, model)
    for layers in ((0,), (1, 2), (2,)):
        parameters, alone = held(model, *layers), held(model, *layers)
        moved.move(parameters)
        step(optimizer, parameters)
        expected = torch.optim.AdamW(
            [
                {"params": [p for name, p in alone.items() if name.endswith("weight")], "weight_decay": 0.3},
                {"params": [p for name, p in alone.items() if name.endswith("bias")]},
            ],
            lr=0.1,
        )
        step(expected, alone)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, alone[name], rtol=0, atol=0)


def test_a_schedule_goes_on_with_the_same_optimizer() -> None:
    model = whole()
    optimizer = grouped(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    moved = MovedOptimizer(optimizer, model)
    for layer in (0, 1):
        parameters = held(model, layer)
        moved.move(parameters)
        step(optimizer, parameters)
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]


def test_a_group_that_the_script_adds_later_stays() -> None:
    model = whole()
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([named["0.weight"]], lr=0.1)
    moved = MovedOptimizer(optimizer, model)
    optimizer.add_param_group({"params": [named["2.bias"]], "lr": 0.5})
    parameters = held(model, 2)
    moved.move(parameters)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [[], [id(parameters["2.bias"])]]
