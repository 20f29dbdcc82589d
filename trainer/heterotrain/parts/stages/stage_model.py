"""The part of a model that one stage of a pipeline holds, and its forward pass from and to the neighbours' tensors.

The part is the whole model with layers of other stages taken out, so names of parameters stay. The model's own
``forward`` runs on the first stage up to the layers that it lacks. On the last stage it runs on the meta device up to
the layers that are there, where the received tensor takes the place of what it has computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from heterotrain.errors import UsageError
from heterotrain.parts.batches import run
from heterotrain.parts.stages.trace import PassTrace, Shared, to_meta
from heterotrain.parts.units.units import Units, check_stages


class StageModel:
    """Units ``[start, stop)`` of a model.

    Attributes:
        parts: names in ``Units.parts`` that the stage holds.
        incoming: tensors that the stage receives for each micro-batch: the input of its first unit, and what every
            layer of the list gets besides its input.
    """

    def __init__(self, units: Units, seen: PassTrace, *, start: int, stop: int) -> None:
        """Take layers of other stages out of the model; give values to the others with ``InitialValues.fill``.

        Args:
            units: of the whole model, whose layers may be on the meta device.
            seen: of the same model.
            start: the first unit.
            stop: the unit after the last one.

        Raises:
            UsageError: the model cannot be computed in stages.
        """
        check_stages(units.model)
        self.start, self.stop = start, stop
        self.parts = tuple(name for name in units.parts if any(name in seen.parts[unit] for unit in range(start, stop)))
        self._options, self._rest = seen.options, seen.rest
        self._last = len(units.names)
        self.incoming = 1 + (seen.shared if units.path and start < self._last - 1 else 0)
        self._handed: tuple[torch.Tensor, ...] | None = None
        self._shared: tuple[torch.Tensor, ...] = ()
        self._early = _OnMeta()
        listed = units.model.get_submodule(units.path)
        self._layers = list(units.layers)
        names = list(listed._modules)  # noqa: SLF001  # torch has no public way
        for index, name in enumerate(names):
            unit = index + units.first_layer
            if not start <= unit < stop:
                self._layers[index] = listed._modules[name] = _Elsewhere(seen.rest[unit])  # noqa: SLF001  # as above
            if units.path and start == 0 and unit == stop:
                self._layers[index].register_forward_pre_hook(self._leave, with_kwargs=True)
            if units.path and seen.shared and 0 < start <= unit < stop == self._last:
                self._layers[index].register_forward_pre_hook(self._with_shared(unit), with_kwargs=True)
        if units.path and start == 0 and stop == self._last - 1:
            self._layers[-1].register_forward_hook(_leave_behind)
        self.units = replace(units, layers=tuple(self._layers))
        if units.path and start > 0 and stop == self._last:
            if start == self._last - 1:
                self._layers[-1].register_forward_hook(self._replace_output)
            else:
                self._layers[start - 1].register_forward_pre_hook(self._replace_input, with_kwargs=True, prepend=True)

    def forward(self, received: tuple[torch.Tensor, ...] | None, inputs: Any) -> Any:
        """Return the model's output on the last stage, else the tensors that the next one receives.

        Args:
            received: from the stage before; ``None`` on the first one.
            inputs: of the micro-batch, as in ``step.compute``; the stages in the middle need none.

        Raises:
            UsageError: the model computes something from values that this stage lacks.
        """
        if not self.units.path:
            value = None if received is None else received[0]
            for unit in range(self.start, self.stop):
                value = run(self._layers[unit], inputs) if unit == 0 else self._layers[unit](value)
            return value if self.stop == self._last else (value,)
        if self.start == 0:
            try:
                return run(self.units.model, inputs)
            except _Reached as reached:
                return reached.values
        if received is None:
            raise UsageError("a stage that is not the first one received nothing")
        self._shared = received[1:]
        if self.stop < self._last:
            value = received[0]
            for unit in range(self.start, self.stop):
                arguments, named = self._filled(unit)
                output = self._layers[unit - 1](value, *arguments, **named)
                value = output if self._rest[unit] is None else output[0]
            return (value, *(self._shared if self.stop < self._last - 1 else ()))
        self._handed = received
        with self._early:
            self._early.is_on = True
            return run(self.units.model, to_meta(inputs))

    def _replace_input(self, _layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return (self._take(), *arguments[1:]), named

    def _replace_output(self, _layer: Any, _arguments: Any, _output: Any) -> Any:
        rest = self._rest[self._last - 2]
        return self._take() if rest is None else (self._take(), *rest)

    def _filled(self, unit: int) -> Any:
        """Return what a layer gets besides its input."""
        return tree_map(
            lambda value: self._shared[value.number] if isinstance(value, Shared) else value, self._options[unit]
        )

    def _with_shared(self, unit: int) -> Any:
        def hook(_layer: Any, arguments: tuple[Any, ...], _named: dict[str, Any]) -> Any:
            rest, named = self._filled(unit)
            return (arguments[0], *rest), named

        return hook

    def _leave(self, _layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Leave the model's forward pass at the first layer that the stage lacks."""
        found: dict[int, torch.Tensor] = {}
        template = tree_leaves(self._options[self.stop])
        for place, value in zip(template, tree_leaves((arguments[1:], named)), strict=True):
            if isinstance(place, Shared):
                found[place.number] = value
        raise _Reached((arguments[0], *(found[number] for number in sorted(found))))

    def _take(self) -> Any:
        self._early.is_on = False
        handed, self._handed = self._handed, None
        if handed is None:
            raise UsageError("the model calls a layer of its list twice")
        return handed[0]


class _Elsewhere(torch.nn.Module):
    """Stands where a layer of another stage was."""

    def __init__(self, rest: tuple[Any, ...] | None) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, x: Any, *_arguments: Any, **_named: Any) -> Any:
        """Return the input, in a tuple where the layer returned one."""
        return x if self.rest is None else (x, *self.rest)


class _Reached(BaseException):
    """The forward pass has come to the first layer that the stage lacks; no ``except Exception`` may catch it."""

    def __init__(self, values: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.values = values


def _leave_behind(_layer: Any, _arguments: Any, output: Any) -> None:
    raise _Reached((output[0] if isinstance(output, tuple) else output,))


class _OnMeta(TorchFunctionMode):
    """While it is on, computes on the meta device, whatever the arguments are on."""

    is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_on or func is torch.Tensor.to:
            return func(*args, **(kwargs or {}))
        self.is_on = False  # the conversions below are calls, too
        try:
            args, kwargs = to_meta(args), to_meta(kwargs or {})
        finally:
            self.is_on = True
        return func(*args, **kwargs)
