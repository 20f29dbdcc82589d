"""Bytes of training state by the script's own optimizers, found out on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from heterotrain.parts.planned.cuttable import CuttableModel
from heterotrain.parts.planned.optimizer_costs import state_ratio
from heterotrain.parts.units.initial_weights import InitialValues, built

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
MAKES: dict[str, tuple[Make, float]] = {
    "plain SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 2.0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), 3.0),
    "Adam": (torch.optim.Adam, 4.0),
    "AMSGrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), 5.0),
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), 4.0),
    "Adagrad, whose state is there at once": (torch.optim.Adagrad, 3.0),
}


def model(width: int = 8) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))


def by_unit(whole: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    return [list(layer.parameters()) for layer in whole.children()]


@pytest.mark.parametrize("name", list(MAKES))
def test_it_is_what_the_optimizer_holds_after_a_real_step(name: str) -> None:
    """And the optimizer is as it was: it trains like one that was not asked."""
    make, expected = MAKES[name]
    with torch.device("meta"):
        whole = model()
    optimizer = make(list(whole.parameters()))
    before = copy.deepcopy(optimizer.state_dict())
    assert state_ratio(by_unit(whole), [optimizer]) == expected
    assert {key: value.keys() for key, value in optimizer.state.items()} == {
        key: value.keys() for key, value in make(list(whole.parameters())).state.items()
    }
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert all(parameter.grad is None for parameter in whole.parameters())
    real = model()
    trained = make(list(real.parameters()))
    real(torch.ones(1, 8)).sum().backward()
    trained.step()
    size = sum(p.nbytes for p in real.parameters())
    held = sum(v.nbytes for s in trained.state.values() for v in s.values() if torch.is_tensor(v) and v.dim())
    assert (2 * size + held) / size == expected


def test_of_a_model_that_is_frozen_in_part_the_largest_unit_counts() -> None:
    with torch.device("meta"):
        whole = model()
    units = by_unit(whole)
    for parameter in [*units[0], *units[1]]:
        parameter.requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(whole.parameters())
    assert state_ratio(units, [optimizer]) == 4.0
    assert state_ratio(units[:2], [optimizer]) == 1.0


class ByValue(torch.optim.SGD):
    """An optimizer that looks at values."""

    def step(self, closure: Any = None) -> Any:
        """Take a step where the first parameter is positive."""
        if float(self.param_groups[0]["params"][0].sum()) > 0:
            return super().step(closure)
        return None


@pytest.mark.parametrize("kind", ["by value", "with values"])
def test_an_optimizer_that_needs_values_has_no_ratio(kind: str) -> None:
    """The operator then takes four; gradients and groups are as before."""
    if kind == "by value":
        with torch.device("meta"):
            whole = model()
        optimizer: torch.optim.Optimizer = ByValue(whole.parameters(), lr=0.1)
    else:
        whole = model()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    assert state_ratio(by_unit(whole), [optimizer]) is None
    assert all(parameter.grad is None for parameter in whole.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_hooks_and_schedulers_do_not_see_the_step() -> None:
    seen: list[object] = []
    cut = CuttableModel(built(model), None, InitialValues(seed=1, device=torch.device("cpu")))
    cut.look(torch.zeros(1, 8))
    optimizer = torch.optim.SGD(cut.model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizers: Sequence[torch.optim.Optimizer] = [optimizer]
    assert cut.state_ratio(optimizers) == 2.0
    assert seen == []
    assert not getattr(optimizer, "_opt_called", False)
    assert scheduler.get_last_lr() == [0.1]
