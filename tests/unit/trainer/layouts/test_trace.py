"""The run that checks whether a model is a sequence of its units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.layouts.initial_weights import built
from heterotrain.layouts.schedule_1f1b import Pass, passes
from heterotrain.layouts.trace import trace
from heterotrain.layouts.units import units_of

Forward = Callable[[Any, torch.Tensor], Any]


class Layer(torch.nn.Module):
    """A block that takes more than its input, and may return more than a tensor."""

    returns_tuple = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        y = torch.tanh(self.linear(x)) * scale
        y = y if mask is None else y * mask[:, None]
        return (y, None) if self.returns_tuple else y


class Net(torch.nn.Module):
    """Two blocks between an embedding and a head; its forward pass is the case's own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 4)
        self.blocks = torch.nn.ModuleList([Layer(), Layer()])
        self.head = torch.nn.Linear(4, 2)
        self.run = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def plain(net: Any, x: torch.Tensor) -> Any:
    x = net.embed(x)
    for block in net.blocks:
        x = block(x, scale=0.5)
    return net.head(x)


def tied(net: Any, x: torch.Tensor) -> Any:
    return net.blocks[1](net.blocks[0](net.embed(x))) @ net.embed.weight


def with_mask(net: Any, x: torch.Tensor) -> Any:
    return net.head(net.blocks[1](net.blocks[0](net.embed(x)), x[:, 0] > 0))


def between(net: Any, x: torch.Tensor) -> Any:
    return net.head(net.blocks[1](net.blocks[0](net.embed(x)) * 2))


def skipping(net: Any, x: torch.Tensor) -> Any:
    early = net.embed(x)
    return net.head(net.blocks[1](net.blocks[0](early)) + early)


def backwards(net: Any, x: torch.Tensor) -> Any:
    return net.head(net.blocks[0](net.blocks[1](net.embed(x))))


def once(net: Any, x: torch.Tensor) -> Any:
    return net.head(net.blocks[0](net.embed(x)))


def seen(forward: Forward) -> Any:
    return trace(units_of(built(lambda: Net(forward)), "blocks"), torch.ones(5, 3))


def test_each_unit_has_its_parts_options_and_bytes() -> None:
    found = seen(plain)
    assert found.parts == (("embed",), ("blocks.0",), ("blocks.1",), ("head",))
    assert found.options[1] == ((), {"scale": 0.5})
    assert found.parameter_bytes == (64, 80, 80, 40)
    assert found.boundary_bytes == (16, 16, 16, 8)
    assert all(16 <= size <= 64 for size in found.activation_bytes[1:3])


def test_a_unit_has_the_parts_whose_parameters_it_uses() -> None:
    found = seen(tied)
    assert found.parts[0] == found.parts[3] == ("embed",)


@pytest.mark.parametrize(
    ("forward", "sentence"),
    [
        (with_mask, "blocks.1 gets a second tensor besides its input, which stages cannot pass on"),
        (between, "something is computed between blocks.0 and blocks.1"),
        (skipping, "what comes after blocks uses a value from before it, which the last stage lacks"),
        (backwards, "blocks.1 does not come right after blocks.0"),
        (once, "forward does not call every layer of 'blocks' once"),
    ],
)
def test_a_model_that_is_not_a_sequence_is_refused(forward: Forward, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        seen(forward)
    assert sentence in str(error.value)


def test_a_layer_that_returns_a_tuple_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "returns_tuple", True)
    with pytest.raises(UsageError, match=r"blocks\.0 returns a tuple: stages pass on one tensor only"):
        seen(plain)


@pytest.mark.parametrize("micro_batches", [0, 1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_keeps_as_many_micro_batches_as_stages_follow(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        order, kept, most = list(passes(stage=stage, stages=stages, micro_batches=micro_batches)), set[int](), 0
        for kind, index in order:
            kept.add(index) if kind is Pass.FORWARD else kept.remove(index)
            most = max(most, len(kept))
        assert most == min(micro_batches, stages - stage)
        assert not kept
        assert [index for kind, index in order if kind is Pass.BACKWARD] == list(range(micro_batches))
