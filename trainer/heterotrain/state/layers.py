"""The layers of a model, cached: walking through a deep model takes as long as a small step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch


class Layers:
    """The layers of a model, including the model itself, with their own parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._contents: list[dict[str, Any]] = []
        """Each layer's dictionaries of layers, parameters and buffers; torch keeps them for the life of the layer."""
        self._parameters: list[dict[str, torch.nn.Parameter | None]] = []
        self._buffers: list[tuple[str, dict[str, torch.Tensor | None]]] = []
        self._children: list[dict[str, torch.nn.Module | None]] = []
        self._layers: list[torch.nn.Module] = []
        self._size = -1
        self._ids: list[int] = []

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and buffers, as ``named_buffers`` does; a shared buffer comes once for each of its names."""
        self._look()
        found = []
        for prefix, buffers in self._buffers:
            found += [(prefix + name, buffer) for name, buffer in buffers.items() if buffer is not None]
        return found

    def trainable_ids(self, *, look: bool = True) -> list[int]:
        """Return ``id(parameter)`` of all parameters that require a gradient; a shared one once for each of its names.

        It differs when parameters were added, replaced, frozen or unfrozen, as long as the caller keeps the old ones.

        Args:
            look: whether to look for new layers first.
        """
        if look:
            self._look()
        found = []
        for own in self._parameters:
            for parameter in own.values():
                if parameter is not None and parameter.requires_grad:
                    found.append(id(parameter))  # noqa: PERF401  # a comprehension is a call, up to Python 3.11
        return found

    def contents(self) -> tuple[list[torch.nn.Parameter], list[torch.nn.Module]]:
        """Return parameters whose changes torch counts, and layers, without a look for new ones."""
        found = [each for own in self._parameters for each in own.values() if each is not None]
        return [each for each in found if not each.is_inference()], self._layers

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield names and parameters of the model."""
        return self._model.named_parameters()

    def state(self) -> tuple[object, ...]:
        """Return where parameters and buffers are, which of them are trained, and which layers are in training mode."""
        self._look()
        own: list[dict[str, Any]] = [*self._parameters, *(buffers for _, buffers in self._buffers)]
        found = [tensor for tensors in own for tensor in tensors.values() if tensor is not None]
        modes = [layer.training for layer in self._layers]
        return (*[(tensor.data_ptr(), tensor.requires_grad) for tensor in found], *modes)

    def _look(self) -> None:
        """Walk through the model again when a layer has gained, lost or replaced a layer, or gained a first tensor."""
        ids = list(map(id, chain.from_iterable(map(dict.values, self._children))))
        if sum(map(len, self._contents)) == self._size and ids == self._ids:
            return
        named = [(name and f"{name}.", layer) for name, layer in self._model.named_modules()]
        layers = [layer for _, layer in named]
        # The private attributes, since torch's public methods walk through the model each time.
        self._parameters = [layer._parameters for layer in layers if layer._parameters]  # noqa: SLF001  # see above
        self._buffers = [(name, layer._buffers) for name, layer in named if layer._buffers]  # noqa: SLF001  # see above
        self._contents = [
            contents
            for layer in layers
            for contents in (layer._modules, layer._parameters, layer._buffers)  # noqa: SLF001  # see above
        ]
        self._children = [layer._modules for layer in layers if layer._modules]  # noqa: SLF001  # see above
        self._layers = layers  # an id may be given to a new object when the old one is gone
        self._size = sum(map(len, self._contents))
        self._ids = list(map(id, chain.from_iterable(map(dict.values, self._children))))
