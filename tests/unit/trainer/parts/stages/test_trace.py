"""The run that checks whether a model is a sequence of its units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.parts.stages.schedule_1f1b import Pass, passes
from heterotrain.parts.stages.trace import Shared, trace
from heterotrain.parts.units.initial_weights import built
from heterotrain.parts.units.units import units_of

Forward = Callable[[Any, torch.Tensor], Any]


class Layer(torch.nn.Module):
    """A block that takes more than its input, and may return more than a tensor."""

    more: tuple[Any, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        y = torch.tanh(self.linear(x)) * scale
        y = y if mask is None else y * mask[:, None]
        return (y, *self.more) if self.more else y


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


def shared_mask(net: Any, x: torch.Tensor) -> Any:
    mask, x = x[:, 0] > 0, net.embed(x)
    for block in net.blocks:
        x = block(x, mask)
    return net.head(x)


def learned_mask(net: Any, x: torch.Tensor) -> Any:
    x = net.embed(x)
    mask = x[:, 0]
    for block in net.blocks:
        x = block(x, mask)
    return net.head(x)


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


def test_weights_that_a_backward_pass_keeps_are_no_activations() -> None:
    """A linear layer keeps its input and a view of its weights, which are much larger here."""
    model = built(lambda: torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)))
    found = trace(units_of(model, None), torch.ones(2, 300))
    assert all(size <= 2 * 1200 for size in found.activation_bytes)


def test_a_unit_has_the_parts_whose_parameters_it_uses() -> None:
    found = seen(tied)
    assert (found.parts[0], found.parts[3]) == (("embed", "head"), ("embed",))


@pytest.mark.parametrize(
    ("forward", "sentence"),
    [
        (with_mask, "blocks.1 gets a tensor besides its input that not every layer gets"),
        (learned_mask, "blocks.0 gets a tensor besides its input that has a gradient"),
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


def without_head(net: Any, x: torch.Tensor) -> Any:
    return net.blocks[1](net.blocks[0](net.embed(x)))


@pytest.mark.parametrize("chosen", [lambda x: (x[:, 0] > 0).nonzero().flatten(), lambda x: x[:, 0] > 0])
def test_a_layer_may_choose_samples_by_their_values(
    chosen: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the experts of a mixture do; the bytes are those with all samples chosen."""
    monkeypatch.setattr(Layer, "forward", lambda self, x, **_: torch.zeros_like(x).index_put(
        (chosen(x),), self.linear(x[chosen(x)])
    ))  # fmt: skip
    seen = trace(units_of(built(lambda: Net(plain)), "blocks"), torch.zeros(6, 3))
    assert seen.boundary_bytes == (16, 16, 16, 8)
    assert all(size >= 16 for size in seen.activation_bytes[1:3])


def test_a_part_that_nothing_uses_belongs_to_the_first_unit() -> None:
    assert seen(without_head).parts[0] == ("embed", "head")


def test_a_tensor_that_every_layer_gets_is_shared() -> None:
    found = seen(shared_mask)
    assert found.shared == 1
    assert found.options[1] == found.options[2] == ((Shared(0),), {})
    assert found.boundary_bytes[0] == 16 + 1


def first_of(net: Any, x: torch.Tensor) -> Any:
    x = net.embed(x)
    for block in net.blocks:
        x = block(x)[0]
    return net.head(x)


def test_a_layer_may_return_a_tensor_with_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "more", (None, {"cache": 3}))
    found = seen(first_of)
    assert found.rest[1:3] == ((None, {"cache": 3}),) * 2


def test_a_layer_that_returns_two_tensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "more", (torch.zeros(1, device="meta"),))
    with pytest.raises(UsageError, match=r"blocks\.0 returns a tuple: stages pass on one tensor only"):
        seen(first_of)


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
