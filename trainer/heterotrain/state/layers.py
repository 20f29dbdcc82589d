"""The layers of a model, found without walking through it in every step: in a deep one that takes as long as a small step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class Layers:
    """A model's layers, itself included, and what they hold themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._held: list[dict[str, Any]] = []
        """What every layer holds: layers, parameters, buffers; torch keeps these dictionaries for the layer's life."""
        self._parameters: list[dict[str, torch.nn.Parameter | None]] = []
        self._buffers: list[tuple[str, dict[str, torch.Tensor | None]]] = []
        self._size = -1

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers, as ``named_buffers`` does; one that is shared comes once for each of its names."""
        self._look()
        for prefix, buffers in self._buffers:
            for name, buffer in buffers.items():
                if buffer is not None:
                    yield prefix + name, buffer

    def requires_grad_flags(self) -> tuple[bool, ...]:
        """Return for each parameter whether it requires a gradient: another tuple when layers came or were frozen."""
        self._look()
        return tuple([p.requires_grad for held in self._parameters for p in held.values() if p is not None])

    def _look(self) -> None:
        """Walk through the model when some layer got something new, or lost something."""
        if sum(map(len, self._held)) == self._size:
            return
        named = [(name and f"{name}.", layer) for name, layer in self._model.named_modules()]
        layers = [layer for _, layer in named]
        # The public ways walk the model each time.
        self._parameters = [layer._parameters for layer in layers if layer._parameters]  # noqa: SLF001  # see above
        self._buffers = [(prefix, layer._buffers) for prefix, layer in named if layer._buffers]  # noqa: SLF001  # see above
        self._held = [
            held
            for layer in layers
            for held in (layer._modules, layer._parameters, layer._buffers)  # noqa: SLF001  # see above
        ]
        self._size = sum(map(len, self._held))
