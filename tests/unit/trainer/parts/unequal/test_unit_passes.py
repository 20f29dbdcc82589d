"""Which units a rank exchanges during its passes, and in which order, whatever its samples use."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.parts.unequal import gathered_unit
from heterotrain.parts.unequal.gathered_unit import GatheredUnit
from heterotrain.parts.unequal.shards import ModelShards
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of
from heterotrain_core.contract.plan import Layout, LayoutKind
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.pass_time import DeviceTimes, collectives, gathered_bytes
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from support.repeat import times

Forward = Callable[[Any, torch.Tensor], torch.Tensor]
BEGIN, REDUCE = GatheredUnit.begin_gathering, GatheredUnit.reduce


class Alone:
    """A group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Seen(torch.autograd.Function):
    """Calls a function in the forward and in the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, number: int, call: Callable[[str], None]) -> torch.Tensor:
        context.call = number, call
        call(f"forward {number}")
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        number, call = context.call
        call(f"backward {number}")
        return gradients[0], None, None


class Block(torch.nn.Linear):
    """A layer that tells when it computes."""

    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        self.number = number
        self.call: Callable[[str], None] = lambda _what: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Seen.apply(x, self.number, self.call))  # type: ignore[no-untyped-call]  # as torch


class Clock:
    """Seconds of a pass: one clock for the rank, and one for its link, on which a unit takes its bytes in seconds.

    What is around the list of layers moves as one unit, named ``embed``.
    """

    def __init__(self, profiles: dict[str, UnitProfile]) -> None:
        self.profiles, self.now, self.link = profiles, 0.0, 0.0
        self.arrived: dict[str, float] = {}

    def size(self, name: str) -> int:
        names = ("embed", "head") if name == "embed.weight" else (name.removesuffix(".weight"),)
        return sum(self.profiles[each].parameter_bytes for each in names)

    def begin(self, name: str) -> None:
        self.link = max(self.link, self.now) + self.size(name)
        self.arrived[name] = self.link

    def wait(self, name: str) -> None:
        self.now = max(self.now, self.arrived[name])

    def reduce(self, name: str) -> None:
        if name == "blocks.0.weight":  # autograd computes the embedding before the callback that ends the pass
            self.compute("backward embed")
        self.now = self.link = max(self.now, self.link) + self.size(name)

    def compute(self, what: str) -> None:
        direction, _, name = what.partition(" ")
        profile = self.profiles[f"blocks.{name}" if name.isdigit() else name]
        (point,) = profile.seconds["a"]
        self.now += point.forward_s if direction == "forward" else point.backward_s


class Net(torch.nn.Module):
    """Three blocks between an embedding and a head."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
        self.blocks = torch.nn.ModuleList(map(Block, range(3)))
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.blocks, self.embed(x)))  # type: ignore[no-any-return]  # torch


def through(*numbers: int) -> Forward:
    def forward(blocks: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        for number in numbers:
            x = torch.tanh(blocks[number](x))
        return x

    return forward


def a_rank(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelShards, list[str]]:
    """Return a rank that holds everything, and what it begins to exchange, by the first parameter of the unit."""
    seen: list[str] = []

    def beginning(unit: GatheredUnit) -> None:
        if not unit.is_gathered and unit._arriving is None:
            seen.append(f"gather {unit.slots[0].name}")
        BEGIN(unit)

    def reducing(unit: GatheredUnit) -> None:
        seen.append(f"reduce {unit.slots[0].name}")
        REDUCE(unit)

    monkeypatch.setattr(GatheredUnit, "begin_gathering", beginning)
    monkeypatch.setattr(GatheredUnit, "reduce", reducing)
    layout = Layout(kind=LayoutKind.SHARDED, shards=1, state_weights=(1,))
    group: Any = Alone()
    part = ModelShards(
        units_of(built(lambda: Net(forward)), "blocks"),
        layout,
        group,
        InitialValues(seed=0, device=torch.device("cpu")),
    )
    part.begin(units_of(built(lambda: Net(forward)), "blocks"))
    return part, seen


def test_a_unit_begins_to_be_gathered_when_the_one_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two units are in memory at most, and the gradient of one."""
    most: list[int] = []

    def call(what: str) -> None:
        seen.append(what)
        units = part._passes._units
        parameters = [row.values.untyped_storage().nbytes() for unit in units for row in unit.rows]
        gradients = [row.gradient.nbytes for unit in units for row in unit.rows if row.gradient is not None]
        one = units[0].rows[0].values.nbytes
        assert sum(parameters) <= 2 * one
        assert sum(gradients) == (one if what.startswith("backward") else 0)
        most.append(sum(parameters))

    part, seen = a_rank(through(0, 1, 2), monkeypatch)
    for _, layer in part.model.named_modules():
        if isinstance(layer, Block):
            layer.call = call
    part.forward(0, 0, torch.ones(3, 2)).sum().backward()
    assert seen == [
        "gather embed.weight", "gather blocks.0.weight",
        "gather blocks.1.weight", "forward 0", "gather blocks.2.weight", "forward 1", "forward 2",
        "gather blocks.1.weight", "backward 2",
        "reduce blocks.2.weight", "gather blocks.0.weight", "backward 1", "reduce blocks.1.weight", "backward 0",
        "reduce blocks.0.weight", "reduce embed.weight",
    ]  # fmt: skip
    assert len(set(most)) == 2  # the last unit of a direction has none after it


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("seed", range(times(gate=6, every=200)))
def test_the_planner_predicts_a_pass_in_the_order_of_the_trainer(
    seed: int, around: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks of a real pass, with drawn seconds of passes and messages: one clock for the rank, one for its link.

    What is around the list of layers takes nothing where a model has nothing there.
    """
    rng = random.Random(seed)  # noqa: S311  # reproducible
    names = ("embed", "blocks.0", "blocks.1", "blocks.2", "head")
    profiles = tuple(
        UnitProfile(
            name=name, parameter_bytes=rng.randint(1, 60), activation_bytes=0, boundary_bytes=0,
            seconds={"a": (UnitSeconds(micro_batch_samples=1, forward_s=rng.uniform(1, 40),
                                       backward_s=rng.uniform(1, 60)),)},
        )
        for name in names
    )  # fmt: skip
    units = profiles if around else profiles[1:-1]
    if not around:
        nothing = (UnitSeconds(micro_batch_samples=1, forward_s=0, backward_s=0),)
        first, last = (replace(each, parameter_bytes=0, seconds={"a": nothing}) for each in (profiles[0], profiles[-1]))
        profiles = (first, *units, last)
    problem = Problem(
        units=units, kinds=(DeviceKind(name="a", count=2, memory_bytes=1),), default_link=Link(bytes_per_s=0.5),
        batch_samples=1, micro_batches=(1,), may_shard=True, reduces_late=True, ends_inside=not around,
    )  # fmt: skip
    clock = Clock({profile.name: profile for profile in profiles})

    def forward(blocks: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        clock.compute("forward embed")
        return through(0, 1, 2)(blocks, x)

    part, _ = a_rank(forward, monkeypatch)
    begin, gather, reduce = GatheredUnit.begin_gathering, GatheredUnit.gather, GatheredUnit.reduce

    def beginning(unit: GatheredUnit) -> None:
        if not unit.is_gathered and unit._arriving is None:
            clock.begin(unit.slots[0].name)
        begin(unit)

    def gathering(unit: GatheredUnit) -> None:
        if not unit.is_gathered:
            unit.begin_gathering()
            clock.wait(unit.slots[0].name)
        gather(unit)

    def reducing(unit: GatheredUnit) -> None:
        clock.reduce(unit.slots[0].name)
        reduce(unit)

    monkeypatch.setattr(GatheredUnit, "begin_gathering", beginning)
    monkeypatch.setattr(GatheredUnit, "gather", gathering)
    monkeypatch.setattr(GatheredUnit, "reduce", reducing)
    for _, layer in part.model.named_modules():
        if isinstance(layer, Block):
            layer.call = clock.compute
    output = part.forward(0, 0, torch.ones(3, 2)).sum()
    clock.compute("forward head")
    clock.compute("backward head")
    output.backward()
    ring = collectives(problem, ["a", "a"])
    predicted = DeviceTimes(problem, "a", 1).overlapped_s(ring, 0.5)
    assert predicted[1] == pytest.approx(clock.now)


class Around(torch.nn.Module):
    """A list of layers between two others."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.embed, *inner, self.head = linears(widths)
        self.blocks = torch.nn.ModuleList(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]  # torch


def linears(widths: Sequence[int]) -> list[torch.nn.Linear]:
    return [torch.nn.Linear(before, after) for before, after in itertools.pairwise(widths)]


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("seed", range(times(gate=6, every=200)))
def test_the_planner_counts_the_bytes_of_gathered_units(
    seed: int, around: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parameters, gradients and arriving sums of a real pass, at each point where the rank takes memory."""
    rng = random.Random(seed)  # noqa: S311  # reproducible
    widths = [rng.randint(1, 30) for _ in range(rng.randint(4, 8))]

    def build() -> torch.nn.Module:
        return Around(widths) if around else torch.nn.Sequential(*linears(widths))

    path = "blocks" if around else None
    layout = Layout(kind=LayoutKind.SHARDED, shards=1, state_weights=(1,))
    group: Any = Alone()
    part = ModelShards(units_of(built(build), path), layout, group, InitialValues(seed=0, device=torch.device("cpu")))
    part.begin(units_of(built(build), path))
    units = [part._passes._rest, *part._passes._units]
    seen: list[int] = []

    def count(more: int = 0) -> None:
        rows = [row for unit in units for row in unit.rows]
        kept = sum(row.gradient.nbytes for row in rows if row.gradient is not None)
        seen.append(more + kept + sum(row.values.untyped_storage().nbytes() for row in rows))

    begin_backward, sums = GatheredUnit.begin_backward, gathered_unit.sum_of_parts

    def beginning(unit: GatheredUnit) -> None:
        BEGIN(unit)
        count()

    def making_room(unit: GatheredUnit) -> None:
        begin_backward(unit)
        count()

    def adding_up(group: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        count(2 * sum(part.nbytes for part in parts))  # the gradient, and as many bytes of parts that arrive
        return sums(group, parts)

    monkeypatch.setattr(GatheredUnit, "begin_gathering", beginning)
    monkeypatch.setattr(GatheredUnit, "begin_backward", making_room)
    monkeypatch.setattr(gathered_unit, "sum_of_parts", adding_up)
    part.forward(0, 0, torch.ones(2, widths[0])).sum().backward()
    problem = Problem(
        units=tuple(
            UnitProfile(
                name="", parameter_bytes=4 * (before * after + after), activation_bytes=0, boundary_bytes=0,
                seconds={"a": (UnitSeconds(micro_batch_samples=1, forward_s=1, backward_s=1),)},
            )
            for before, after in itertools.pairwise(widths)
        ),
        kinds=(DeviceKind(name="a", count=2, memory_bytes=1),), batch_samples=1, micro_batches=(1,), may_shard=True,
        reduces_late=True, ends_inside=not around,
    )  # fmt: skip
    assert gathered_bytes(problem, 2) == max(seen)


def test_a_pass_that_is_left_gives_up_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(blocks: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        blocks[0](x)
        raise RuntimeError("out of memory")

    part, _ = a_rank(fails, monkeypatch)
    arriving = part._passes._units[1]
    before = arriving.rows[0].values
    with pytest.raises(RuntimeError, match="out of memory"):
        part.forward(0, 0, torch.ones(3, 2))
    assert arriving._arriving is not None
    part.forget_pass()
    assert arriving._arriving is None
    assert arriving.rows[0].values is not before  # messages may still arrive in the earlier memory
    assert arriving.rows[0].values.untyped_storage().nbytes() == 0
    assert before.untyped_storage().nbytes() > 0


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
    assert [name for name in seen if "blocks" in name] == [
        "gather blocks.0.weight", "gather blocks.1.weight", "gather blocks.2.weight", "reduce blocks.2.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("numbers", [(0, 0, 1, 2), (1, 0, 2)])
def test_a_layer_that_runs_twice_or_too_early_is_refused(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    part, _ = a_rank(through(*numbers), monkeypatch)
    with pytest.raises(UsageError, match=r"layer 0 of the list runs after layer [01]: members of several workers need"):
        part.forward(0, 0, torch.ones(3, 2))
