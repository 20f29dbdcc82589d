"""Models as sequences of units: what cannot be cut is refused, and initial weights do not depend on the holder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import check_cut, check_stages, units_of

CPU = torch.device("cpu")


class Block(torch.nn.Module):
    """A residual block whose own reset replaces a value of a layer in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout(0.5)
        self.scale = torch.nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.inner.weight, std=0.02)
        torch.nn.init.constant_(self.scale, 0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.drop(self.inner(x))


class Model(torch.nn.Module):
    """A decoder with tied embedding and head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.stack = torch.nn.Module()
        self.stack.h = torch.nn.ModuleList(Block(8) for _ in range(blocks))
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.stack.h:
            x = block(x)
        return self.head(self.norm(x))


def filled(seed: int = 0, parts: list[str] | None = None) -> torch.nn.Module:
    units = units_of(built(Model), "stack.h")
    InitialValues(seed=seed, device=CPU).fill(units, parts)
    return units.model


def test_units_have_the_names_of_the_whole_model() -> None:
    units = units_of(Model(), "stack.h")
    assert units.names == ("before stack.h", "stack.h.0", "stack.h.1", "stack.h.2", "after stack.h")
    assert list(units.parts) == ["embed", "stack.h.0", "stack.h.1", "stack.h.2", "norm", "head"]
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())
    assert units_of(layers, None).names == ("0", "1")


@pytest.mark.parametrize("parts", [["embed", "stack.h.0"], ["stack.h.1"], ["stack.h.2", "norm", "head"]])
def test_initial_weights_do_not_depend_on_what_else_a_rank_holds(parts: list[str]) -> None:
    whole, part = dict(filled().named_parameters()), dict(filled(parts=parts).named_parameters())
    every = dict(filled(parts=parts).named_parameters(remove_duplicate=False))
    real = [name for name, p in part.items() if not p.is_meta and name != "head.weight"]
    assert real
    assert all(torch.equal(part[name], whole[name]) for name in real)
    if "head" in parts:  # the last stage lacks the embedding, and its tied weight begins alike
        assert torch.equal(every["head.weight"], whole["embed.weight"])
    assert {name.split(".")[0] for name in real} <= {part.split(".")[0] for part in parts}


def test_initial_weights_follow_the_seed_and_each_layer_s_reset() -> None:
    one, again, other = filled(), filled(), filled(1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    assert one.stack.h[1].scale.item() == pytest.approx(0.7)
    assert one.stack.h[1].inner.weight.std().item() < 0.05
    assert not torch.equal(one.stack.h[0].inner.weight, one.stack.h[1].inner.weight)
    assert one.head.weight is one.embed.weight


def test_drawing_initial_weights_leaves_the_script_s_random_numbers() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    filled()
    assert torch.equal(torch.rand(3), expected)


class OwnInit(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        torch.nn.init.zeros_(self.weight)


class NoReset(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))


class HalfReset(NoReset):
    def reset_parameters(self) -> None:
        pass


class RootParameter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.places = torch.nn.Parameter(torch.empty(4))


@pytest.mark.parametrize(
    ("factory", "path", "sentence"),
    [
        (
            lambda: torch.nn.Sequential(OwnInit()),
            None,
            "has no effect: initialise weights in a method reset_parameters",
        ),
        (lambda: torch.nn.Sequential(NoReset()), None, "layer '0' (NoReset) has 'scale' but no reset_parameters()"),
        (lambda: torch.nn.Sequential(HalfReset()), None, "reset_parameters() leaves '0.scale' without values"),
        (lambda: 3, None, "a function that returns a int"),
        (RootParameter, "stack.h", "'places' belongs to the model itself, outside of all units"),
        (Model, None, "a Model is not a sequence of layers: name its list of layers"),
        (Model, "blocks", "units='blocks' is not a list of layers of Model: it has 'stack.h'"),
        (Model, "norm", "units='norm' is not a list of layers of Model: it has 'stack.h'"),
        (lambda: Model(blocks=0), "stack.h", "its list of layers is empty"),
        (lambda: torch.nn.Sequential(*[torch.nn.Tanh()] * 2), None, "a layer occurs twice"),
    ],
)
def test_models_that_cannot_be_built_are_refused_with_a_sentence(
    factory: Callable[[], torch.nn.Module], path: str | None, sentence: str
) -> None:
    with pytest.raises(UsageError) as error:
        InitialValues(seed=0, device=CPU).fill(units_of(built(factory), path))
    assert sentence in str(error.value)


def test_cuts_and_layers_of_stages_are_checked() -> None:
    names = ("0", "1", "2")
    check_cut(names, (0, 1, 3))
    with pytest.raises(UsageError, match="4 stages are too many for a model of 3 units"):
        check_cut(names, (0, 1, 2, 3, 3))
    for cuts in ((0, 0, 3), (1, 3), (0, 2), (0, 2, 1, 3)):
        with pytest.raises(UsageError, match="each needs at least one"):
            check_cut(names, cuts)
    with pytest.raises(UsageError, match="layer '1' is a BatchNorm1d"):
        check_stages(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))


def test_units_draw_by_seed_step_unit_and_place_of_the_samples() -> None:
    units = units_of(filled(), "stack.h")
    draws, x = UnitDraws(units, seed=5, device=CPU), torch.arange(4)[None]

    def run(step: int, start: int) -> torch.Tensor:
        torch.rand(3)  # earlier draws do not count
        with draws.at(step, start):
            return units.model(x).detach()

    first = run(1, 0)
    assert torch.equal(first, run(1, 0))
    assert not torch.equal(first, run(2, 0))
    assert not torch.equal(first, run(1, 4))
    with draws.at(1, 0):  # the middle unit alone, as in a stage
        alone = units.layers[1](torch.ones(1, 8))
    torch.rand(1)
    with draws.at(1, 0):
        units.layers[0](torch.ones(1, 8))
        assert torch.equal(alone, units.layers[1](torch.ones(1, 8)))
    torch.manual_seed(0)
    one = units.model(x)
    assert not torch.equal(one, units.model(x))  # outside of a step, units draw as always


def test_another_cut_into_micro_batches_draws_other_numbers() -> None:
    """PyTorch draws for all samples of a micro-batch at once: the docs promise no more than the same micro-batches."""
    units = units_of(filled(), "stack.h")
    draws, x = UnitDraws(units, seed=5, device=CPU), torch.arange(4).repeat(4, 1)

    def run(*sizes: int) -> torch.Tensor:
        found, start = [], 0
        for part in x.split(sizes):
            with draws.at(1, start):
                found.append(units.model(part).detach())
            start += len(part)
        return torch.cat(found)

    assert torch.equal(run(2, 2), run(2, 2))
    assert torch.equal(run(2, 2)[2:], run(1, 1, 2)[2:])
    assert not torch.equal(run(2, 2)[2:], run(4)[2:])
