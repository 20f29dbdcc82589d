"""Which units a rank exchanges during its passes, and in which order, whatever its samples use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.layouts.gathered_unit import GatheredUnit
from heterotrain.layouts.initial_weights import built
from heterotrain.layouts.shards import Shards
from heterotrain.layouts.units import units_of
from heterotrain_core.contract.plan import Layout, LayoutKind

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Alone:
    """A group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Net(torch.nn.Module):
    """Three blocks between an embedding and a head."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.blocks, self.embed(x)))  # type: ignore[no-any-return]  # torch


def through(*numbers: int) -> Forward:
    def forward(blocks: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        for number in numbers:
            x = torch.tanh(blocks[number](x))
        return x

    return forward


def a_rank(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> tuple[Shards, list[str]]:
    """Return a rank that holds everything, and the first parameter of each unit that it exchanges, in order."""
    seen: list[str] = []
    monkeypatch.setattr(GatheredUnit, "_exchange", lambda unit, *_: seen.append(unit.slots[0].name))
    layout = Layout(kind=LayoutKind.SHARDED, shards=1, state_weights=(1,))
    group: Any = Alone()
    part = Shards(units_of(built(lambda: Net(forward)), "blocks"), layout, group, seed=0, device=torch.device("cpu"))
    part.begin(units_of(built(lambda: Net(forward)), "blocks"))
    return part, seen


@pytest.mark.parametrize("numbers", [(0, 2), (1,), (2,), (0,), ()])
def test_skipped_layers_are_exchanged_in_the_same_order(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3, 2)
    orders = []
    for used in ((0, 1, 2), numbers):
        part, seen = a_rank(through(*used), monkeypatch)
        for _ in range(2):
            part.forward(0, 0, x).sum().backward()
        with torch.no_grad():
            part.forward(0, 0, x)
        orders.append(seen)
        gradients = {name: parameter.grad for name, parameter in part.named_parameters()}
        assert all((gradients[f"blocks.{number}.weight"] is not None) == (number in used) for number in range(3))
        assert gradients["embed.weight"] is not None
    assert orders[0] == orders[1]


def test_frozen_layers_have_no_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    part, seen = a_rank(through(0, 1, 2), monkeypatch)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.2", "head")))
    part.forward(0, 0, torch.ones(3, 2)).sum().backward()
    assert [name for name in seen if name.startswith("blocks")] == [
        "blocks.0.weight", "blocks.1.weight", "blocks.2.weight", "blocks.2.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("numbers", [(0, 0, 1, 2), (1, 0, 2)])
def test_a_layer_that_runs_twice_or_too_early_is_refused(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    part, _ = a_rank(through(*numbers), monkeypatch)
    with pytest.raises(UsageError, match=r"layer 0 of the list runs after layer [01]: members of several workers need"):
        part.forward(0, 0, torch.ones(3, 2))
