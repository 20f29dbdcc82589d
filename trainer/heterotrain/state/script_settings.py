"""What the body of a script's loop may change of model and optimizers between two steps, without a pass or an update.

A step that is repeated late needs it as it was, although the body has gone on since. Flags and numbers are put back.
Values of parameters are only watched, by torch's count of changes, because copies would double the memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from heterotrain.state.layers import Layers

_IS_TRAINED, _MODE, _VERSION = attrgetter("requires_grad"), attrgetter("training"), attrgetter("_version")


class ScriptSettings:
    """Trained parameters, modes of layers, and the optimizers' numbers, as they are when this is made."""

    def __init__(
        self,
        layers: Layers,
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    ) -> None:
        """Note the settings.

        Args:
            layers: of the model, as they were found in its last pass.
            optimizers: all of the job.
            tracked: yields the parameters that forward passes may change.
        """
        self._layers, self._optimizers, self._tracked = layers, optimizers, tracked
        self._parameters, self._modules = layers.contents()
        self._are_trained = list(map(_IS_TRAINED, self._parameters))
        self._versions = list(map(_VERSION, self._parameters))
        self._modes = list(map(_MODE, self._modules))
        self._numbers = [_numbers(optimizer) for optimizer in optimizers]

    def restore(self) -> ScriptSettings:
        """Put everything back but the values of parameters; return what was there."""
        now = ScriptSettings(self._layers, self._optimizers, self._tracked)
        self._put(now)
        return now

    def resume(self, before: ScriptSettings) -> None:
        """Put back what the script had changed since ``before``, which was restored."""
        self._put(before)

    def _put(self, other: ScriptSettings) -> None:
        """Set what differs in other settings; groups of parameters that the script has added stay."""
        for parameter, is_trained in zip(self._parameters, self._are_trained, strict=True):
            parameter.requires_grad_(is_trained)
        for module, mode in zip(self._modules, self._modes, strict=True):
            module.training = mode
        for optimizer, own, others in zip(self._optimizers, self._numbers, other._numbers, strict=True):
            for group, numbers, differing in zip(optimizer.param_groups, own, others, strict=False):
                group.update({name: value for name, value in numbers.items() if value != differing.get(name)})

    def drop_changes_of_groups(self) -> bool:
        """Put the optimizers' groups of parameters and numbers back; return whether the script has changed any."""
        if [_numbers(optimizer) for optimizer in self._optimizers] == self._numbers:
            return False
        for optimizer, own in zip(self._optimizers, self._numbers, strict=True):
            del optimizer.param_groups[len(own) :]
            for group, numbers in zip(optimizer.param_groups, own, strict=True):
                group.update(numbers)
        return True

    def changed(self) -> list[str]:
        """Return the names of parameters that were written to since; torch does not count writes to ``.data``."""
        if list(map(_VERSION, self._parameters)) == self._versions:
            return []
        own = {id(tensor) for _, tensor in self._tracked()}
        now = zip(self._parameters, self._versions, strict=True)
        found = {id(each) for each, version in now if each._version != version} - own  # noqa: SLF001  # torch's own count of changes
        return [name for name, parameter in self._layers.named_parameters() if id(parameter) in found]


def _numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of parameters."""
    return [
        {name: value for name, value in group.items() if name != "params" and not isinstance(value, torch.Tensor)}
        for group in optimizer.param_groups
    ]
