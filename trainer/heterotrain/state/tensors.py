"""Training state as a list of tensors and a small skeleton, for joiners and for checkpoints.

The skeleton holds plain values (numbers, text, lists, dictionaries) and a marker in place of each tensor. It is read
with ``weights_only=True``: neither a peer nor a file can make this process run code.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from heterotrain.errors import HeterotrainError, UsageError

_MARKER = "__tensor__"
_MODEL = "state.model."
_PLAIN: tuple[Any, ...] = (bool, int, float, str, bytes)


class Stateful(Protocol):
    """Anything with the two methods of torch's optimizers and schedulers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state over."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A state in two parts: the skeleton as bytes, and the tensors that its markers refer to by index."""

    skeleton: bytes
    tensors: list[torch.Tensor]


def flatten(state: Mapping[str, Any]) -> Flat:
    """Take a state apart; the tensors are the live ones, not copies.

    Weights of the model that are tied, so that several names stand for the same memory, become one tensor with several
    markers. Other parts of a state keep a tensor for each name, because their owners may hold on to what they get.

    Raises:
        UsageError: a value is neither plain nor a tensor.
    """
    tensors: list[torch.Tensor] = []
    weights: dict[Any, int] = {}

    def strip(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            index = len(tensors)
            if path.startswith(_MODEL) and value.numel():
                memory = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
                index = weights.setdefault(memory, index)
            if index == len(tensors):
                tensors.append(value.detach())
            return {_MARKER: index, "shape": list(value.shape), "dtype": str(value.dtype)}
        if isinstance(value, Mapping):
            return {key: strip(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [strip(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(strip(item, f"{path}[{i}]") for i, item in enumerate(value))
        for plain in _PLAIN:
            if isinstance(value, plain):
                return plain(value)  # a subclass (a numpy float, a version string) could not be read back
        if value is None:
            return None
        raise UsageError(
            f"the state of {path} holds a {type(value).__name__}: "
            "use only numbers, text, lists, dictionaries and tensors"
        )

    buffer = io.BytesIO()
    torch.save(strip(dict(state), "state"), buffer)
    return Flat(buffer.getvalue(), tensors)


def empty_like_skeleton(skeleton: bytes) -> Flat:
    """Return a flat state with empty CPU tensors of the right shapes, to be filled by a transfer."""
    found: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            if _MARKER in value:
                found[value[_MARKER]] = torch.empty(value["shape"], dtype=_dtype(value["dtype"]))
                return
            for item in value.values():
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(_load(skeleton))
    return Flat(skeleton, [found[index] for index in range(len(found))])


def unflatten(flat: Flat) -> dict[str, Any]:
    """Put a state together again; it shares the memory of the tensors.

    Raises:
        HeterotrainError: the skeleton is not one made by ``flatten``.
    """

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            if _MARKER in value:
                return flat.tensors[value[_MARKER]]
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, tuple):
            return tuple(fill(item) for item in value)
        return value

    state = fill(_load(flat.skeleton))
    if not isinstance(state, dict):
        raise HeterotrainError("a state's skeleton has to be a dictionary")
    return state


def _load(skeleton: bytes) -> Any:
    return torch.load(io.BytesIO(skeleton), weights_only=True)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise HeterotrainError(f"a state's skeleton names an unknown dtype {name!r}")
    return found
