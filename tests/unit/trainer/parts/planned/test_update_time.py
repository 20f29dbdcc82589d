"""Seconds of the script's optimizers for each byte of parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain.parts.planned import optimizer_costs
from heterotrain.parts.planned.optimizer_costs import MEASURED_BYTES, TENSOR_BYTES, update_s_per_byte
from heterotrain.parts.planned.processors import Moment, lasting_s

CPU = torch.device("cpu")
MAKES: dict[str, Any] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "decay of weights only": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:], "weight_decay": 0.0}]
    ),
}


class Picky(torch.optim.SGD):
    """An optimizer that takes steps with the parameters of its model only."""

    def step(self, closure: Any = None) -> Any:
        """Refuse other parameters."""
        if not all(parameter.is_meta for group in self.param_groups for parameter in group["params"]):
            raise RuntimeError("these are not the model's")
        return super().step(closure)


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    with torch.device("meta"):
        return [torch.nn.Parameter(torch.empty(size, 256)) for size in sizes]


def whole(found: list[torch.nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in found)


@pytest.mark.parametrize("name", list(MAKES))
def test_the_optimizer_is_as_it_was(name: str) -> None:
    """And the step is unseen by hooks, which belong to the script."""
    own, seen = parameters(64, 3000), []
    optimizer = MAKES[name](own)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    groups, before = optimizer.param_groups, copy.deepcopy(optimizer.state_dict()["param_groups"])
    found = update_s_per_byte([optimizer], whole(own), device=CPU)
    assert found is not None
    assert 0 < found < math.inf
    assert optimizer.state_dict()["param_groups"] == before
    assert optimizer.param_groups is groups
    assert [p for group in groups for p in group["params"]] == own
    assert not optimizer.state
    assert seen == []
    assert all(parameter.grad is None for parameter in own)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let each look at the clocks be one second later, and return the bytes that each step updates."""
    bytes_: list[int] = []
    real = optimizer_costs.step_alone

    def step(optimizer: torch.optim.Optimizer) -> None:
        bytes_.append(sum(p.nbytes for group in optimizer.param_groups for p in group["params"]))
        real(optimizer)

    def clocks(_device: torch.device) -> Callable[[], Moment]:
        looks = iter(range(1000))
        return lambda: Moment(float(next(looks)), 0.0)

    monkeypatch.setattr(optimizer_costs, "clocks", clocks)
    monkeypatch.setattr(optimizer_costs, "step_alone", step)
    return bytes_


def test_parameters_that_are_not_trained_take_no_time(steps: list[int]) -> None:
    """A rank's bytes include them."""
    own = parameters(100, 300)
    own[1].requires_grad_(requires_grad=False)
    found = update_s_per_byte([torch.optim.SGD(own, lr=0.1)], whole(own), device=CPU)
    assert set(steps) == {own[0].nbytes}
    assert found == pytest.approx(1.0 / whole(own))


def test_large_models_are_measured_in_part(steps: list[int]) -> None:
    """No tensor of a model that fills many devices is made whole."""
    own = parameters(100, 10**9, 10**9, *([10**6] * 40))
    found = update_s_per_byte([torch.optim.SGD(own, lr=0.1)], whole(own), device=CPU)
    assert found is not None
    assert MEASURED_BYTES <= steps[0] <= MEASURED_BYTES + TENSOR_BYTES
    assert found == pytest.approx(1.0 / steps[0])


def test_a_slow_optimizer_makes_two_steps(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some compute roots of matrices; the other workers wait for this rank's profile."""
    monkeypatch.setattr(optimizer_costs, "LONGEST_S", 3.0)
    own = parameters(100)
    assert update_s_per_byte([torch.optim.SGD(own, lr=0.1)], whole(own), device=CPU) == pytest.approx(1.0 / whole(own))
    assert len(steps) == 2


def test_several_optimizers_take_their_times_one_after_the_other(steps: list[int]) -> None:
    own = parameters(100, 300)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(own[:1], lr=0.1), torch.optim.Adam(own[1:])]
    assert update_s_per_byte(optimizers, whole(own), device=CPU) == pytest.approx(2.0 / whole(own))
    assert set(steps) == {own[0].nbytes, own[1].nbytes}


def test_what_cannot_be_measured_is_not_known() -> None:
    own = parameters(100)
    assert update_s_per_byte([Picky(own, lr=0.1)], whole(own), device=CPU) is None
    assert own[0].grad is None
    assert update_s_per_byte([], whole(own), device=CPU) is None
    own[0].requires_grad_(requires_grad=False)
    assert update_s_per_byte([torch.optim.SGD(own, lr=0.1)], whole(own), device=CPU) is None


def test_a_run_among_many_takes_its_processor_time_on_the_processors_that_there_are() -> None:
    runs = [Moment(1.0, 0.5), Moment(9.0, 4.0), Moment(2.0, 0.75)]
    assert lasting_s(runs, math.inf) == 2.0
    assert lasting_s(runs, 0.25) == 3.0
