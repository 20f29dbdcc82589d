"""Traces what a model's ``forward`` does around its list of layers, in one run on the meta device.

The run checks that the model is a sequence: each unit gets what the unit before it returned, and nothing else that was
computed on the way. It also shows which parameters each unit uses, and the bytes that it keeps and hands on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from heterotrain.errors import UsageError
from heterotrain.parts.batches import run
from heterotrain.parts.stages.neighbours import DTYPES
from heterotrain.parts.units.initial_weights import first_line
from heterotrain.parts.units.units import Units


@dataclass(frozen=True, slots=True)
class Shared:
    """Stands for a tensor that the model computes before its list of layers and gives to every layer.

    Attributes:
        number: of the tensor, from 0.
    """

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTrace:
    """What was seen of each unit.

    Attributes:
        parts: names of the parts (``Units.parts``) whose parameters a unit uses, by unit.
        options: what a layer in the list gets besides its input, by unit: arguments and named arguments, with
            ``Shared`` in place of tensors.
        shared: tensors that every layer in the list gets besides its input, such as a mask.
        rest: what a layer in the list returns after its tensor, in a tuple; ``None`` for the tensor alone. By unit.
        parameter_bytes: of the parts of each unit; a tied parameter counts in every unit that has it.
        activation_bytes: kept for each sample for the backward pass, rounded up, by unit.
        boundary_bytes: of the output for each sample, rounded up, by unit.
    """

    parts: tuple[tuple[str, ...], ...]
    options: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]
    shared: int
    rest: tuple[tuple[Any, ...] | None, ...]
    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]


def trace(units: Units, inputs: Any) -> PassTrace:
    """Return what the model does with these inputs; nothing is computed, and the model stays as it is.

    Args:
        units: of the whole model.
        inputs: of a batch of at least one sample, as in ``step.compute``; only types and shapes count.

    Raises:
        UsageError: the model is not a sequence of its units.
    """
    found = _Run(units)
    samples = max(1, next((len(t) for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim()), 1))
    found.follow(to_meta(inputs))
    parts = units.parts
    found.used[0] |= set(parts) - set().union(*found.used)  # a part that nothing uses has its state, too
    return PassTrace(
        parts=tuple(tuple(name for name in parts if name in used) for used in found.used),
        options=tuple(found.options),
        shared=len(found.shared),
        rest=tuple(found.rest),
        parameter_bytes=tuple(
            sum({id(p): p.nbytes for name in used for p in parts[name].parameters()}.values()) for used in found.used
        ),
        activation_bytes=tuple(-(-size // samples) for size in found.kept),
        boundary_bytes=tuple(-(-size // samples) for size in found.returned),
    )


def to_meta(values: Any) -> Any:
    """Return the values with all tensors on the meta device."""
    return tree_map(lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, values)


class _Run(TorchFunctionMode):
    """The run: which unit it is in, and what happens there."""

    def __init__(self, units: Units) -> None:
        super().__init__()
        self.unit = 0
        self._path = units.path
        self._names = units.names
        self._first = units.first_layer
        self._copy = copy.deepcopy(units.model).to("meta")
        number = len(units.names)
        self.used: list[set[str]] = [set() for _ in range(number)]
        self.options: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = [((), {})] * number
        self.rest: list[tuple[Any, ...] | None] = [None] * number
        self.shared: list[torch.Tensor] = []
        self.kept, self.returned = [0] * number, [0] * number
        copied = {name: self._copy.get_submodule(name) for name in units.parts}
        self._owner: dict[int, set[str]] = {}
        for name, layer in copied.items():
            for tensor in (*layer.parameters(), *layer.buffers()):
                self._owner.setdefault(id(tensor), set()).add(name)
        own = (*self._copy.parameters(), *self._copy.buffers())
        self._weights = {tensor.untyped_storage()._cdata for tensor in own}  # noqa: SLF001  # their identity
        layers = list(self._copy.get_submodule(units.path).children() if units.path else self._copy.children())
        for index, layer in enumerate(layers):
            unit = index + self._first
            if layer._backward_hooks or layer._backward_pre_hooks:  # noqa: SLF001  # torch has no public way to ask
                raise UsageError(
                    f"{units.names[unit]} has a backward hook, for which torch changes the layer's input and output: "
                    "use a hook of a tensor or parameter"
                )
            self.used[unit].add(f"{units.path}.{index}".lstrip(".") if units.path else units.names[unit])
            layer.register_forward_pre_hook(self._enters(unit), with_kwargs=True)
            layer.register_forward_hook(self._leaves(unit))
        self._hidden: Any = None
        self._early: dict[int, torch.Tensor] = {}
        self._storages: set[int] = set()

    def follow(self, inputs: Any) -> None:
        self._early = {id(t): t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)}
        keeps = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        config: Any = _config  # torch has no public way; layers may choose samples by values
        with self, keeps, config.patch(meta_nonzero_assume_all_nonzero=True):
            output = self._computed(inputs)
        expected = len(self._names) - (1 if self._path else 0)
        if self.unit != expected or (self._path and self._hidden is None):
            raise UsageError(f"the model's forward does not call every layer of {self._path or 'the list'!r} once")
        self.returned[-1] = sum(t.nbytes for t in tree_leaves(output) if isinstance(t, torch.Tensor))

    def _computed(self, inputs: Any) -> Any:
        try:
            return run(self._copy, inputs)
        except (RuntimeError, TypeError) as error:
            unit, why = self._names[min(self.unit, len(self._names) - 1)], first_line(error)
            if "meta" in str(error) or isinstance(error, NotImplementedError):
                raise UsageError(
                    f"{unit} cannot be computed without values, and job.wrap looks at the model so ({why}): make "
                    "tensors on the device of its input, or as buffers, and take no values out of tensors, as item(), "
                    "numpy() and if do"
                ) from error
            raise UsageError(f"{unit} fails on the first samples ({why}): try one batch without job.wrap") from error

    def _check_passed(self, unit: int, tensor: torch.Tensor) -> None:
        if tensor.dtype not in DTYPES:
            raise UsageError(
                f"{self._names[unit]} returns a tensor of {tensor.dtype}, which stages cannot pass on: let it return "
                "one of torch.float32 or bfloat16"
            )

    def _enters(self, unit: int) -> Any:
        def hook(_layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if unit != self.unit + (1 if self._path else 0):
                raise UsageError(f"{self._names[unit]} does not come right after {self._names[unit - 1]}")
            first, *rest = arguments or (None,)
            if not isinstance(first, torch.Tensor) and unit:
                raise UsageError(f"{self._names[unit]} needs one tensor as its first argument")
            if unit > self._first and first is not self._hidden:
                raise UsageError(f"something is computed between {self._names[unit - 1]} and {self._names[unit]}")
            self.options[unit] = self._with_places(unit, (tuple(rest), named)) if unit else (tuple(rest), named)
            if unit == 1 and self._path:
                self._check_passed(0, first)
                self.returned[0] = sum(tensor.nbytes for tensor in (first, *self.shared))
            self.unit = unit

        return hook

    def _with_places(self, unit: int, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return what a layer gets besides its input, with ``Shared`` in place of tensors."""
        if unit == self._first:
            self.shared = list({id(t): t for t in tree_leaves(given) if isinstance(t, torch.Tensor)}.values())
        numbers = {id(tensor): number for number, tensor in enumerate(self.shared)}
        tensors = [value for value in tree_leaves(given) if isinstance(value, torch.Tensor)]
        if {id(tensor) for tensor in tensors} != set(numbers) or any(id(t) not in self._early for t in tensors):
            raise UsageError(
                f"{self._names[unit]} gets a tensor besides its input that not every layer gets, or that is computed "
                "between two layers: compute it inside the layer, or once before all layers"
            )
        if any(tensor.requires_grad for tensor in tensors):
            raise UsageError(
                f"{self._names[unit]} gets a tensor besides its input that has a gradient, which stages cannot pass "
                "back: compute it inside the layer"
            )
        return tree_map(lambda v: Shared(numbers[id(v)]) if isinstance(v, torch.Tensor) else v, given)

    def _leaves(self, unit: int) -> Any:
        def hook(_layer: Any, _arguments: Any, output: Any) -> None:
            found, *rest = output if isinstance(output, tuple) and output else (output,)
            if not isinstance(found, torch.Tensor) or any(isinstance(v, torch.Tensor) for v in tree_leaves(rest)):
                raise UsageError(
                    f"{self._names[unit]} returns a {type(output).__name__}: stages pass on one tensor only"
                )
            if unit < len(self._names) - 1:
                self._check_passed(unit, found)
            self.rest[unit] = tuple(rest) if isinstance(output, tuple) else None
            self._hidden = found
            self.returned[unit] = sum(tensor.nbytes for tensor in (found, *self.shared))
            self._storages.clear()
            if (unit == len(self._names) - 2 and self._path) or not self._path:
                self.unit = unit + 1

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs or {})) if isinstance(value, torch.Tensor)]
        output = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
        at = min(self.unit, len(self._names) - 1)
        for tensor in tensors:
            self.used[at] |= self._owner.get(id(tensor), set())
        if self._path and self.unit == 0:
            self._early.update((id(tensor), tensor) for tensor in made)
        elif self._path and self._hidden is not None and self.unit == len(self._names) - 1 and made:
            outside = [t for t in tensors if id(t) in self._early and id(t) not in self._owner]
            if outside:
                raise UsageError(
                    f"what comes after {self._path} uses a value from before it, which the last stage lacks: compute "
                    "it again there, or take it into the layers' output"
                )
        return output

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()  # backward passes keep views of weights, too
        if storage._cdata not in self._storages | self._weights:  # noqa: SLF001  # its identity
            self._storages.add(storage._cdata)  # noqa: SLF001  # as above
            self.kept[min(self.unit, len(self._names) - 1)] += storage.nbytes()
        return tensor
