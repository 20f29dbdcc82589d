"""Fused optimizers behind a gate; their kernels exist for CPUs, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain.exchange.gate import Gate
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.numerics.fused import can_stay_behind, prefer_fused, take_step

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2))


def compute(model: torch.nn.Module, number: int) -> list[torch.Tensor]:
    """Compute gradients that differ by ``number``; return them."""
    model.zero_grad()
    x = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [value.detach().clone() for value in (*model.parameters(), *states)]


@pytest.mark.parametrize("closed_by", ["the flag", "a value"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_gate_leaves_no_trace(kind: str, closed_by: str) -> None:
    """Weights, moments and counts keep their bits, and the next step is what it would have been."""
    found = []
    for skips in (True, False):
        model = model_of()
        optimizer = KINDS[kind](model.parameters())
        compute(model, 0)
        optimizer.step()
        if skips:
            flag, flats = AbortFlag(), compute(model, 1)
            if closed_by == "the flag":
                flag.lift()
            else:
                flats[0].view(-1)[0] = float("nan")
            before, gate = bits(model, optimizer), Gate(flats, flag)
            gate.clip(0.01)
            take_step(optimizer, 1.0, gate)
            assert all(map(torch.equal, before, bits(model, optimizer)))
            assert not hasattr(optimizer, "found_inf")
            assert not hasattr(optimizer, "grad_scale")
        take_step(optimizer, 0.5, Gate(compute(model, 2), AbortFlag()))
        found.append(bits(model, optimizer))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", KINDS)
def test_an_open_gate_is_the_ordinary_step(kind: str) -> None:
    """With the clipping of ``torch.nn.utils`` and the factor on the learning rate."""
    found = []
    for is_gated in (True, False):
        model = model_of()
        optimizer = KINDS[kind](model.parameters())
        for number in range(4):
            gradients = compute(model, number)
            if is_gated and number:
                gate = Gate(gradients, None)
                gate.clip(0.01)
                take_step(optimizer, 0.5, gate)
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, error_if_nonfinite=True)
            optimizer.param_groups[0]["lr"] = 0.05
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1
        found.append(bits(model, optimizer))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def other_class(parameters: Any) -> torch.optim.Optimizer:
    class Own(torch.optim.SGD):
        """May do anything in its step."""

    return Own(parameters, fused=True)


def with_hook(parameters: Any, *, after: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, fused=True)
    for _ in range(1 if after else 2):  # the library has one before the step
        register: Any = optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook
        register(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (KINDS["SGD"], True),
        (KINDS["SGD, momentum"], True),
        (KINDS["AdamW, amsgrad"], True),
        (lambda p: torch.optim.SGD(p, momentum=0.9), False),
        (torch.optim.NAdam, False),
        (other_class, False),
        (lambda p: with_hook(p, after=True), False),
        (lambda p: with_hook(p, after=False), False),
    ],
)
def test_only_what_is_known_to_leave_no_trace_stays_behind(make: Callable[[Any], Any], expected: bool) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    compute(model, 0)
    has_momenta = optimizer.defaults.get("momentum") != 0
    assert can_stay_behind([optimizer]) is (expected and not has_momenta), "a first step has no state yet"
    optimizer.step()
    assert can_stay_behind([optimizer]) is expected
    assert not can_stay_behind([optimizer, torch.optim.SGD(model.parameters())])


@pytest.mark.parametrize("way", ["thawed", "in another's place"])
def test_a_parameter_that_joins_late_trains_as_without_fused_kernels(way: str) -> None:
    """Torch's own fused SGD fails where some parameters have a momentum and others do not."""
    found = []
    for fused in (True, False):
        model = model_of()
        late = model[2]
        late.requires_grad_(way != "thawed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=fused)
        for number in range(4):
            if number == 2 and way == "thawed":
                late.requires_grad_()
            elif number == 2:  # the state of the old one stays in the optimizer
                late.weight = torch.nn.Parameter(late.weight.detach() + 1.0)
                optimizer.param_groups[0]["params"][-2] = late.weight
            compute(model, number)
            assert can_stay_behind([optimizer]) is (fused and number in (1, 3))
            take_step(optimizer, 1.0)
        found.append(copy.deepcopy(list(model.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def own_class(parameters: Any) -> torch.optim.Optimizer:
    return type("Own", (torch.optim.SGD,), {})(parameters)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.SGD, True),
        (torch.optim.AdamW, True),
        (lambda p: torch.optim.Adam(p, amsgrad=True), True),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5), None),
        (lambda p: torch.optim.SGD(p, foreach=False), None),
        (lambda p: torch.optim.AdamW(p, fused=False), False),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), None),
        (lambda p: torch.optim.SGD([*p, torch.zeros(4, 6)[:, ::2].requires_grad_()]), None),
        (lambda p: torch.optim.SGD([*p, torch.zeros(2, dtype=torch.complex64, requires_grad=True)]), None),
        (own_class, None),
    ],
)  # fmt: skip
def test_kernels_are_fused_where_the_script_leaves_it_open_and_parameters_allow_it(
    make: Callable[[Any], torch.optim.Optimizer], expected: bool | None
) -> None:
    optimizer = make(model_of().parameters())
    prefer_fused(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [expected]


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
def test_kernels_that_become_fused_go_on_from_the_state_of_others(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    found = []
    for fuses in (True, False):
        model = model_of()
        optimizer = make([*model.parameters(), torch.zeros(0, requires_grad=True)])
        for number in range(4):
            if fuses and number == 2:
                prefer_fused(optimizer)
            compute(model, number)
            optimizer.param_groups[0]["params"][-1].grad = torch.zeros(0)
            take_step(optimizer, 1.0)
        found.append(copy.deepcopy(list(model.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
