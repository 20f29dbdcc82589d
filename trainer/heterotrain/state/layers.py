"""The layers of a model, found without walking through it in every step: in a deep one that takes as long as a small step."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class Layers:
    """A model's layers, itself included, and what they hold themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._named: list[tuple[str, torch.nn.Module]] = []
        self._children = -1

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers, as ``named_buffers`` does; one that is shared comes once for each of its names."""
        for prefix, layer in self._now():
            for name, buffer in layer._buffers.items():  # noqa: SLF001 - the public ways walk the model
                if buffer is not None:
                    yield prefix + name, buffer

    def wants_gradients(self) -> tuple[bool, ...]:
        """Return for each parameter whether it requires a gradient: another tuple when layers came or were frozen."""
        return tuple(
            parameter.requires_grad
            for _, layer in self._now()
            for parameter in layer._parameters.values()  # noqa: SLF001 - as above
            if parameter is not None
        )

    def _now(self) -> list[tuple[str, torch.nn.Module]]:
        children = sum(len(layer._modules) for _, layer in self._named)  # noqa: SLF001 - as above
        if children != self._children:  # some layer got another one, or lost one
            self._named = [(name and f"{name}.", layer) for name, layer in self._model.named_modules()]
            self._children = sum(len(layer._modules) for _, layer in self._named)  # noqa: SLF001 - as above
        return self._named
