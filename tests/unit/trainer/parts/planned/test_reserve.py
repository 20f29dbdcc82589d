"""Memory for a stage's first update is there before any rank commits the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from heterotrain.errors import OutOfMemory
from heterotrain.parts.planned.cuttable import CuttableModel
from heterotrain.parts.planned.part import PlannedPart
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.state.training import TrainState
from heterotrain_core.contract.outcome import Cause
from unit.trainer.membership.test_agreement import PLAN, a_part

UNIT = (4 * 4 + 4) * 4
"""Bytes of one unit; the first stage of the plan has half of the eight units."""
LARGEST = 4 * 4 * 4

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def a_stage(make: Make) -> PlannedPart:
    """Return the member of the first of two stages, with initial values."""
    cuttable = CuttableModel(
        built(lambda: torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))),
        None,
        InitialValues(seed=1, device=torch.device("cpu")),
    )
    cuttable.look(torch.zeros(1, 4))
    training = TrainState(order="as given")
    training.optimizers = [make(cuttable.model.parameters())]
    member = a_part(cuttable, training, measure=lambda _example: cuttable.state_ratio(training.optimizers))
    member.follow(training.optimizers[0])
    member.look(lambda samples: torch.zeros(samples, 4))
    member.place(PLAN, 0)
    cuttable.begin(member.part)
    return member


def held_units(member: PlannedPart) -> int:
    """Return the number of units that the stage holds."""
    return sum(p.nbytes for _, p in member.part.named_parameters()) // UNIT


@pytest.mark.parametrize(
    ("make", "states", "temporary"),
    [
        (torch.optim.AdamW, 2, 2 * LARGEST),
        (lambda parameters: torch.optim.AdamW(parameters, foreach=True), 2, None),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), 2, 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0, 2 * LARGEST),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1, 2 * LARGEST),
    ],
)
def test_as_much_is_reserved_as_the_first_update_makes(make: Make, states: int, temporary: int | None) -> None:
    member = a_stage(make)
    own = held_units(member) * UNIT
    found = member.reserve()
    assert sum(each.nbytes for each in found) == states * own + (own if temporary is None else temporary)
    assert member.reserve() == [], "once for each stage"


def test_state_that_is_there_is_not_reserved_again() -> None:
    member = a_stage(torch.optim.AdamW)
    (optimizer,) = member._training.optimizers
    for _, parameter in member.part.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert sum(each.nbytes for each in member.reserve()) == 2 * LARGEST


def test_a_stage_without_room_ends_with_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's own error for CPUs, which is a plain RuntimeError; another error is shown as it is."""
    member = a_stage(torch.optim.AdamW)

    def refused(*_size: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", refused)
    with pytest.raises(OutOfMemory, match="a cut that gives this one fewer units") as found:
        member.reserve()
    assert found.value.cause is Cause.OUT_OF_DEVICE_MEMORY

    def broken(*_size: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(RuntimeError, match="something else"):
        member.reserve()
