"""A model of which each rank holds some elements, and the same training state under random layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from heterotrain.data.progress import Progress
from heterotrain.state.layout import ModelLayout, Shapes
from heterotrain.state.ranges import Holding, TensorRange
from heterotrain.state.training import TrainState

SHAPES: dict[str, tuple[int, ...]] = {"embed.weight": (7, 3), "body.weight": (3, 5), "body.bias": (5,), "scale": ()}
BUFFERS = {"count": torch.tensor(11, dtype=torch.int64)}


def whole_values(seed: int) -> dict[str, torch.Tensor]:
    """Return values of all parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


class Elements(torch.nn.Module):
    """Flat parameters with the elements that a rank holds; ``embed.weight`` is tied to ``head.weight``."""

    def __init__(self, holding: Holding, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.extents = dict(holding)
        for name, extent in holding.items():
            flat = values[name].reshape(-1)[extent.start : extent.stop].clone()
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(flat))
        for name, value in BUFFERS.items():
            self.register_buffer(name, value.clone())


class ElementsLayout(ModelLayout):
    """The layout of such a model."""

    def __init__(self, model: Elements) -> None:
        self._model = model

    @property
    def shapes(self) -> Shapes:
        return SHAPES

    @property
    def holding(self) -> Holding:
        return self._model.extents

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        return [(name, self._parameter(name)) for name in self._model.extents]

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {name: parameter.detach() for name, parameter in self.named_parameters()}
        if "embed.weight" in own:
            own["head.weight"] = own["embed.weight"]
        return own | dict(self._model.named_buffers())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        for name, value in state.items():
            own[name].view(-1).copy_(value.reshape(-1))
        absent = [name for name, value in own.items() if name not in state and value.numel()]
        if absent:
            raise RuntimeError(f"the state lacks\n{absent}")

    def _parameter(self, name: str) -> torch.nn.Parameter:
        return self._model.get_parameter(name.replace(".", "_"))


class Average:
    """An object that a script registers, with a tensor of its own."""

    def __init__(self) -> None:
        self.values = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])


def full() -> dict[str, TensorRange]:
    """Return the holding of everything."""
    return {name: TensorRange(name, 0, math.prod(shape)) for name, shape in SHAPES.items()}


def holding_of(rng: np.random.Generator) -> dict[str, TensorRange]:
    """Return a random holding: some parameters whole, of some a few elements, others not at all."""
    found = {}
    for name, extent in full().items():
        start, stop = sorted(rng.integers(0, extent.stop + 1, 2).tolist())
        choice = rng.integers(0, 4)
        if choice:
            found[name] = extent if choice == 1 else TensorRange(name, start, stop)
    return found


def layouts_of(rng: np.random.Generator, ranks: int) -> list[dict[str, TensorRange]]:
    """Return random holdings that are whole together."""
    found = [holding_of(rng) for _ in range(ranks)]
    for name, extent in full().items():
        cuts = [0, *sorted(rng.integers(0, extent.stop + 1, ranks - 1).tolist()), extent.stop]
        for holding, start, stop in zip(found, cuts, cuts[1:], strict=False):
            own = holding.get(name, TensorRange(name, start, stop))
            holding[name] = TensorRange(name, min(own.start, start), max(own.stop, stop))
    return found


def training_of(holding: Holding, *, seed: int, steps: int = 0) -> TrainState:
    """Return a rank's training, after some steps with gradients that follow from ``seed`` and the step."""
    training = TrainState(order="as given")
    begin(training, Elements(holding, whole_values(seed)))
    training.extras["average"] = Average()
    for step in range(steps):
        gradients = whole_values(1000 * seed + step)
        for name, parameter in training.layout.named_parameters():
            extent = holding[name]
            parameter.grad = gradients[name].reshape(-1)[extent.start : extent.stop].clone()
        training.optimizers[0].step()
        training.extras["average"].values += step  # type: ignore[attr-defined]  # the test's own object
        training.progress = Progress(steps=step + 1)
        training.has_state = True
    return training


def begin(training: TrainState, model: Elements) -> None:
    """Give a training another model and optimizer."""
    layout = ElementsLayout(model)
    training.change_layout(model, layout)
    named = dict(layout.named_parameters())
    decayed = [named[name] for name in ("embed.weight", "body.weight") if name in named]
    others = [named[name] for name in ("body.bias", "scale") if name in named]
    training.optimizers = [torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01)]


def assert_state_is(training: TrainState, expected: TrainState) -> None:
    """Check that a rank holds exactly its elements of the expected whole state."""
    wanted = {held.entry.name: held.values.reshape(-1) for held in expected.flat().held}
    found = training.flat()
    assert training.progress == expected.progress
    assert found.held
    parts = [held for held in found.held if held.own.elements]
    for held in parts:
        whole = wanted[held.entry.name]
        torch.testing.assert_close(
            held.values.reshape(-1), whole[held.own.start : held.own.stop], rtol=0, atol=0, msg=held.entry.name
        )
    names = {held.entry.name for held in parts}
    extents = training.layout.holding
    wanted_names = {
        held.entry.name for held in expected.flat().held if held.entry.of not in SHAPES or _any(extents, held.entry.of)
    }
    assert names == wanted_names, names ^ wanted_names


def _any(holding: Holding, name: str) -> bool:
    return name in holding and holding[name].elements > 0
