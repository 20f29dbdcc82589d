"""The tensors of a model that forward passes change, or may change, with their rules."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heterotrain.forward_state.kinds import rules_of
from heterotrain.forward_state.rules import Combination


@dataclass(slots=True, eq=False)
class ForwardTensor:
    """One tensor.

    Attributes:
        name: in the model.
        layer: whose tensor it is.
        place: the layer's dictionary that holds it, under ``key``.
        key: its name in the layer.
        combination: ``None`` while nothing is known of it, and it is watched.
        is_frozen: whether it is a parameter.
    """

    name: str
    layer: torch.nn.Module
    place: dict[str, Any]
    key: str
    combination: Combination | None
    is_frozen: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is in the layer now."""
        tensor: torch.Tensor = self.place[self.key]
        return tensor


def write(entries: Sequence[ForwardTensor], values: Sequence[torch.Tensor]) -> None:
    """Give tensors other values, and shapes if those differ."""
    tensors = [entry.place[entry.key] for entry in entries]
    for tensor, value in zip(tensors, values, strict=True):
        if tensor.shape != value.shape:
            tensor.resize_(value.shape)
    if tensors:
        torch._foreach_copy_(tensors, list(values))


def rule_of(entry: ForwardTensor) -> Combination:
    """Return the rule of a tensor that has one."""
    if entry.combination is None:
        raise AssertionError(f"{entry.name} has no rule")
    return entry.combination


def entries_of(
    model: torch.nn.Module,
    declared: Sequence[tuple[str, Combination]],
    handled: tuple[type[torch.nn.Module], ...],
) -> Iterator[ForwardTensor]:
    """Yield persistent buffers and frozen parameters, each tensor once.

    Args:
        model: the model.
        declared: patterns of names with their rules; the last one that matches a name counts.
        handled: kinds of layers that keep their buffers the same on all ranks by themselves.
    """
    seen = set()
    for prefix, layer in model.named_modules():
        if isinstance(layer, handled):
            continue
        known = rules_of(layer)
        # The private attributes, as in state/layers.py: values are replaced in these dictionaries.
        for place, is_frozen in ((layer._buffers, False), (layer._parameters, True)):  # noqa: SLF001  # see above
            for key, tensor in place.items():
                if tensor is None or id(tensor) in seen or not _can_be_copied(tensor):
                    continue
                if tensor.requires_grad or (
                    not is_frozen and key in layer._non_persistent_buffers_set  # noqa: SLF001  # torch has no public name
                ):
                    continue
                seen.add(id(tensor))
                name = f"{prefix}.{key}" if prefix else key
                rule = next((given for each, given in reversed(declared) if matches(each, name)), None)
                yield ForwardTensor(name, layer, place, key, rule or (None if is_frozen else known.get(key)), is_frozen)


def matches(pattern: str, name: str) -> bool:
    """Return whether a name is meant by a pattern such as ``quantizer.*``."""
    return fnmatch.fnmatchcase(name, pattern)


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Return whether this is an ordinary tensor, and not one that is sparse, quantized, divided or without values."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_inference())
    )
