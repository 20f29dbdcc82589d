"""The whole model from which stages are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.planned.cuttable import CuttableModel
from heterotrain.parts.stages.stage import Share, Stage
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


def model_of(*widths: int) -> torch.nn.Sequential:
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(widths)]
    return torch.nn.Sequential(*layers)


def cuttable(*widths: int) -> CuttableModel:
    return CuttableModel(built(lambda: model_of(*widths)), None, InitialValues(seed=1, device=CPU))


def begun(model: CuttableModel, cuts: Sequence[int], *, rank: int = 0, recomputes: bool = False) -> Stage:
    """Return a stage with its initial values."""
    stage = model.stage(cuts, MemberGroup(rank=rank, world_size=len(cuts) - 1), recomputes=recomputes)
    model.begin(stage)
    return stage


def test_the_whole_model_cannot_be_run_and_says_what_to_call() -> None:
    model = cuttable(2, 3, 1).model
    with pytest.raises(UsageError, match=r"step\.compute"):
        model(torch.zeros(1, 2))


def test_stages_come_with_values_and_the_whole_model_stays_without() -> None:
    model = cuttable(2, 3, 4, 1)
    model.look(torch.zeros(1, 2))
    stage = begun(model, (0, 1, 3), rank=1)
    assert [name for name, _ in stage.named_parameters()] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert not any(parameter.is_meta for _, parameter in stage.named_parameters())
    assert all(parameter.is_meta for parameter in model.model.parameters())
    again = dict(begun(model, (0, 2, 3), rank=1).named_parameters())
    earlier = dict(stage.named_parameters())
    for name, parameter in again.items():
        torch.testing.assert_close(parameter, earlier[name], rtol=0, atol=0)


def test_a_stage_of_all_units_computes_the_model() -> None:
    model = cuttable(2, 3, 1)
    model.look(torch.zeros(1, 2))
    stage = begun(model, (0, 2))
    batch = (torch.ones(3, 2), torch.zeros(3, 1))
    (found,) = stage.evaluate(lambda _: batch, 1, lambda output, targets: output - targets)
    assert found.shape == (3, 1)
    torch.testing.assert_close(found, stage.model(batch[0]).detach())


class Counted(torch.nn.Linear):
    """Counts its forward passes."""

    passes = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        self.passes += 1
        return super().forward(rows)


def test_a_stage_that_recomputes_runs_its_inner_units_twice_and_has_the_same_gradients() -> None:
    """The first and the last unit of the model keep their activations: the planner counts them so."""
    gradients = []
    for recomputes, expected in ((False, [1, 1, 1, 1]), (True, [1, 2, 2, 1])):
        whole = built(lambda: torch.nn.Sequential(*(Counted(a, b) for a, b in pairwise((2, 3, 4, 3, 1)))))
        model = CuttableModel(whole, None, InitialValues(seed=1, device=CPU))
        model.look(torch.zeros(1, 2))
        stage = begun(model, (0, 4), recomputes=recomputes)
        batch = (torch.ones(2, 2), torch.zeros(2, 1))
        share = Share(step=0, start=0, sizes=(2,), batch_samples=2, fetch=lambda _, batch=batch: batch)
        stage.run(share, lambda output, targets: ((output - targets) ** 2).mean())
        assert [layer.passes for layer in stage.model] == expected  # type: ignore[union-attr]  # a sequence of layers
        gradients.append([parameter.grad for _, parameter in stage.named_parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, rtol=0, atol=0)


class Tied(torch.nn.Module):
    """A loss that adds a norm of the first layer's weights, which another stage has."""

    def __init__(self, model: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.weight, self.how = next(model.parameters()), how

    def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = ((output - targets) ** 2).mean()
        if self.how == "sum":
            return loss + self.weight.square().sum()
        if self.how == "item":
            return loss * self.weight.square().sum().item()
        return loss + (output @ self.weight[:1]).mean()


@pytest.mark.parametrize("how", ["sum", "item", "product"])
def test_a_loss_that_needs_parameters_of_another_stage_is_refused_with_a_sentence(how: str) -> None:
    model = cuttable(2, 3, 1)
    model.look(torch.zeros(1, 2))
    stage = begun(model, (0, 2))
    share = Share(step=0, start=0, sizes=(2,), batch_samples=2, fetch=lambda _: (torch.ones(2, 2), torch.zeros(2, 1)))
    with pytest.raises(UsageError, match="loss_fn uses parameters of the model, which may be on another worker"):
        stage.run(share, Tied(model.model, how))


def test_more_stages_than_units_are_refused_with_a_sentence() -> None:
    model = cuttable(2, 3, 1)
    model.look(torch.zeros(1, 2))
    with pytest.raises(UsageError, match="3 stages are too many for a model of 2 units: use fewer workers"):
        model.even_cuts(3)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=12), st.data())
def test_even_cuts_leave_no_stage_empty(widths: list[int], data: st.DataObject) -> None:
    model = cuttable(*widths)
    model.look(torch.zeros(1, widths[0]))
    stages = data.draw(st.integers(1, len(widths) - 1))
    cuts = model.even_cuts(stages)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(widths) - 1, stages + 1)
    assert all(a < b for a, b in pairwise(cuts))


def test_even_cuts_halve_equal_layers() -> None:
    model = cuttable(4, 4, 4, 4, 4)
    model.look(torch.zeros(1, 4))
    assert model.even_cuts(2) == (0, 2, 4)
    assert model.even_cuts(4) == (0, 1, 2, 3, 4)


def test_a_stage_gets_memory_with_its_first_values_only() -> None:
    """Initial values are those of the whole model; a loaded state is shared, not copied."""
    model = cuttable(200, 300, 100)
    model.look(torch.zeros(1, 200))
    whole = units_of(built(lambda: model_of(200, 300, 100)), None)
    InitialValues(seed=1, device=CPU).fill(whole)
    expected = dict(whole.model.named_parameters())
    for how in ("begin", "load"):
        stage = model.stage((0, 2), MemberGroup(rank=0, world_size=1))
        held = dict(stage.named_parameters())
        assert all(p.untyped_storage().nbytes() == p.element_size() for p in held.values())
        state = {name: parameter.detach().clone() for name, parameter in expected.items()}
        if how == "begin":
            model.begin(stage)
        else:
            stage.load_state_dict(state)
        for name, parameter in stage.named_parameters():
            assert parameter is held[name]
            assert (parameter.data_ptr() == state[name].data_ptr()) == (how == "load")
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)
        stage.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
        assert all(parameter is held[name] and not parameter.any() for name, parameter in stage.named_parameters())
