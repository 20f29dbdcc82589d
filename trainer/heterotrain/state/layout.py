"""A rank's model as a part of the whole model: names, whole shapes, and where this rank's values are.

State is captured, sent and stored by the names and shapes of the whole model. So a state that was written under one
layout can be read under any other.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from heterotrain.state.ranges import Holding, whole

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of all parameters of the whole model by name, in the model's order."""


class ModelLayout(ABC):
    """What this rank's model holds of the whole model. Names are those of the whole model.

    Attributes:
        uses: names of the parameters that this rank has used since this was last cleared; ``None`` if gradients tell
            it. Some layouts give gradients of zeros to parameters that a rank has not used.
    """

    uses: set[str] | None = None

    @property
    @abstractmethod
    def shapes(self) -> Shapes:
        """Shapes of the whole model's parameters, the same on every rank; a tied parameter has its first name."""

    @property
    @abstractmethod
    def holding(self) -> Holding:
        """What this rank holds of the parameters."""

    @abstractmethod
    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Yield this rank's parameters, the objects that its optimizers have."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parameters and buffers, and other state of its layers, as ``torch.nn.Module`` does."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over values; of a divided parameter, a flat tensor with the elements that this rank holds.

        Raises:
            RuntimeError: they belong to another model; the message has the form of ``torch.nn.Module``'s.
        """

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, or of an optimizer's tensor of the same shape; it shares memory."""
        return tensor.detach()

    def like(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the kind and shape of ``parameter`` from the elements that this rank holds, flat."""
        return part.view(parameter.shape)


class WholeModel(ModelLayout):
    """The layout of a rank that holds the whole model."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Describe a model; it may change later."""
        self._model = model

    @property
    def shapes(self) -> Shapes:
        """Shapes of all parameters."""
        return {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}

    @property
    def holding(self) -> Holding:
        """Everything."""
        return whole(sizes_of(self.shapes))

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Yield all parameters."""
        return self._model.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the model's own state."""
        return self._model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the model's own form."""
        self._model.load_state_dict(state)


def sizes_of(shapes: Shapes) -> dict[str, int]:
    """Return the number of elements of each parameter."""
    return {name: math.prod(shape) for name, shape in shapes.items()}


def checksum(shapes: Shapes) -> int:
    """Return a number of 32 bits that differs between models with other names or shapes of parameters."""
    return zlib.crc32(repr(list(shapes.items())).encode())


def check_keys(model: torch.nn.Module, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Refuse a state with other names than a model's.

    Raises:
        RuntimeError: there are some; the message has the form of ``torch.nn.Module``'s.
    """
    for names, what in ((missing, "Missing"), (unexpected, "Unexpected")):
        if names:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model).__name__}:\n\t"
                f"{what} key(s) in state_dict: {', '.join(map(repr, names))}. "
            )


def is_whole(shapes: Shapes, holding: Holding) -> bool:
    """Return whether nothing of the model is missing in ``holding``."""
    return all((holding[name].elements if name in holding else 0) == size for name, size in sizes_of(shapes).items())
