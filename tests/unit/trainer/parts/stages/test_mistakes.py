"""Mistakes in a model that is to be cut into stages: each is answered by one sentence, before the first step."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.planned.cuttable import CuttableModel
from heterotrain.parts.stages.stage import Share
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.state import admission
from torch import nn

CPU = torch.device("cpu")
SAMPLES = torch.ones(5, 3)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def begin(build: Callable[..., Any], *, units: Any = "blocks", inputs: Any = SAMPLES) -> CuttableModel:
    """Do what a worker does before it trains: build, look, measure."""
    whole = built(build)
    admission.check_model(whole, has_values=False)
    model = CuttableModel(whole, units, InitialValues(seed=1, device=CPU))
    model.look(inputs[:1])
    model.profile(lambda samples: inputs[:samples], kind="cpu", limit_s=0.0)
    return model


class Plain(Block):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [torch.ones(4)]


class Buffered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))


class Item(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


class Numpy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.places = torch.arange(3).numpy()


class Locked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ByValue(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if float(x.detach().sum()) > 0 else x


class OnCpu(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Mapped(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x}


class Forgotten(Block):
    def forward(self, x: torch.Tensor) -> Any:
        super().forward(x)


class Doubled(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).double()


class Complex(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.complex(x, x)


class Tiny(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x.to(torch.float8_e4m3fn)


class Named(Net):
    """Has its layers under names, not in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": Block()})  # type: ignore[assignment]  # the mistake


class Dictionary(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return {"scores": super().forward(x)}


def hooked() -> nn.Module:
    model = Net()
    model.blocks[0].register_full_backward_hook(lambda *_: None)
    return model


def loaded() -> nn.Module:
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the same mistake
        model.load_state_dict(EARLIER.state_dict())
    return model


def configured(blocks: int) -> nn.Module:
    return Net(blocks=blocks)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.jit.script(nn.Sequential(nn.Linear(3, 2)))  # type: ignore[no-any-return]  # torch leaves it untyped


EARLIER = Net()


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (configured, "calls the function that builds the model without arguments"),
        (lambda: Net().to("cpu"), "leave .to(device) and loaded weights out of the function"),
        (lambda: Net(Item), "take no values out of tensors in it"),
        (lambda: Net(Numpy), "take no values out of tensors in it"),
        (lambda: EARLIER, "parameter 'embed.weight' was made elsewhere, on cpu"),
        (loaded, "initialise weights in a method reset_parameters() of the layer that has them"),
        (lambda: Net(Plain), "layer 'blocks.0' (Plain) keeps in 'rates' a tensor that is no parameter and no buffer"),
        (lambda: Net(Buffered), "layer 'blocks.0' (Buffered) has 'scale' but no reset_parameters()"),
        (lambda: Net(Locked), "keep locks, files and generators out of its layers"),
        (lambda: Net(lambda: nn.LazyLinear(4)), "has no shape yet"),
        (lambda: Net(lambda: nn.BatchNorm1d(4)), "layer 'blocks.0' is a BatchNorm1d"),
        (scripted, "a compiled model cannot be cut into stages: give job.wrap the model itself"),
        (lambda: torch.compile(Net()), "a compiled model cannot be cut into stages: give job.wrap the model itself"),
        (hooked, "blocks.0 has a backward hook"),
        (Named, "units='blocks' is not a list of layers of Named"),
        (lambda: Net(ByValue), "blocks.0 cannot be computed without values"),
        (lambda: Net(OnCpu), "blocks.0 cannot be computed without values"),
        (lambda: Net(Mapped), "blocks.0 returns a dict: stages pass on one tensor only"),
        (lambda: Net(Forgotten), "blocks.0 returns a NoneType: stages pass on one tensor only"),
        (lambda: Net(Complex), "blocks.0 returns a tensor of torch.complex64, which stages cannot pass on"),
        (lambda: Net(Tiny), "blocks.0 returns a tensor of torch.float8_e4m3fn, which stages cannot pass on"),
        (lambda: Net(Doubled), "blocks.1 fails on the first samples"),
        (lambda: Net(lambda: Block(5)), "blocks.0 fails on the first samples"),
        (Dictionary, "the model's output is a dict: its last unit has to return a tensor"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_one_sentence(build: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        begin(build)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("units", [3, ["blocks"], "layers", "head", "blocks.0"])
def test_units_that_are_no_list_of_layers_are_refused(units: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a list of layers of Net: it has 'blocks'"):
        begin(Net, units=units)


@pytest.mark.parametrize("inputs", [torch.ones(5, 7), "abcde"])
def test_samples_that_do_not_fit_the_model_are_named(inputs: Any) -> None:
    with pytest.raises(UsageError, match="before blocks fails on the first samples"):
        begin(Net, inputs=inputs)


def test_the_error_of_a_function_itself_is_the_scripts_own() -> None:
    """What has nothing to do with stages keeps its type and its traceback."""

    def build() -> nn.Module:
        raise ValueError("there is no such configuration")

    with pytest.raises(ValueError, match="no such configuration"):
        begin(build)


def test_a_loss_that_is_none_is_refused() -> None:
    model = begin(Net)
    stage = model.stage((0, 5), MemberGroup(rank=0, world_size=1))
    model.begin(stage)
    share = Share(step=0, start=0, sizes=(5,), batch_samples=5, fetch=lambda _: (SAMPLES, torch.zeros(5, 2)))
    for loss in (SAMPLES, torch.zeros(()), 1.0):
        with pytest.raises(UsageError, match="loss_fn has to return a tensor without dimensions that depends on"):
            stage.run(share, lambda *_, value=loss: value)  # type: ignore[misc]  # a default argument binds the loop's variable


def tied() -> nn.Module:
    model = Net()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    return model


class Recurrent(Block):
    """Recurrent layers list their parameters a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        found: torch.Tensor = self.cell(x[:, None])[0][:, 0]
        return found


class Counting(Buffered):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.get_buffer("scale"))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.get_buffer("scale")


@pytest.mark.parametrize("build", [tied, lambda: Net(Recurrent), lambda: Net(Counting)])
def test_ties_between_stages_recurrent_layers_and_buffers_work(build: Callable[[], nn.Module]) -> None:
    model = begin(build)
    stage = model.stage((0, 5), MemberGroup(rank=0, world_size=1))
    model.begin(stage)
    (found,) = stage.evaluate(lambda _: (SAMPLES, None), 1, lambda output, _: output)
    assert found.shape == (5, 2)
    held = {id(parameter) for parameter in stage.model.parameters()}
    for layer in stage.model.modules():
        assert {id(weight) for weight in getattr(layer, "_flat_weights", ())} <= held
