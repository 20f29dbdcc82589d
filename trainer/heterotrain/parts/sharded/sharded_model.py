"""A rank's part of a model that ``fully_shard`` has divided, for the code that captures, sends and restores state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from heterotrain.state.layout import ModelLayout, Shapes
from heterotrain.state.local import holding, is_divided, local
from heterotrain.state.ranges import Holding

SETTING = "set_reduce_scatter_unused_params"
"""FSDP's setting for ranks that use different parameters, from PyTorch 2.15."""


class ShardedModel(ModelLayout):
    """The layout of a rank in a sharded member."""

    def __init__(self, model: torch.nn.Module, uses: set[str] | None = None) -> None:
        """Describe a model right after it was divided.

        Its parameters are listed once: while the model computes, torch puts gathered copies in their places.

        Args:
            model: the model.
            uses: as in ``ModelLayout``.
        """
        self.uses = uses
        self._model = model
        self._parameters = list(model.named_parameters())
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters}
        self._holding = holding(self._parameters)

    @property
    def shapes(self) -> Shapes:
        """Shapes of all parameters; every rank of the member knows all of them."""
        return self._shapes

    @property
    def holding(self) -> Holding:
        """This rank's part of each parameter."""
        return self._holding

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Yield the divided parameters."""
        return iter(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state with divided tensors."""
        return self._model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the model's own form, in which a divided parameter is the flat part of this rank.

        Parameters of which this rank holds nothing may be missing.
        """
        own = self._model.state_dict()
        nothing = {name for name, value in own.items() if isinstance(value, torch.Tensor) and not local(value).numel()}
        found = {name: self._of_own_kind(own[name], value) if name in own else value for name, value in state.items()}
        self._model.load_state_dict({name: own[name] for name in nothing} | found)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part."""
        return local(tensor)

    def like(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """Return a divided tensor from this rank's part."""
        found = self._of_own_kind(parameter, part)
        return found if is_divided(found) else part.view(parameter.shape)

    def _of_own_kind(self, own: Any, value: Any) -> Any:
        if not isinstance(own, torch.Tensor) or not is_divided(own) or is_divided(value):
            return value
        part = local(own)
        divided: Any = own
        flat = value.reshape(-1).to(part.device)
        if flat.numel() != part.numel():
            raise RuntimeError(f"\n\tsize mismatch: {flat.numel()} elements for a part of {part.numel()}.")
        kind: Any = sys.modules["torch.distributed.tensor"]
        return kind.DTensor(flat.view(part.shape), divided._spec, requires_grad=False)  # noqa: SLF001  # as FSDP itself


def watch_uses(model: torch.nn.Module, divided: Sequence[torch.nn.Module]) -> set[str]:
    """Return a set that gets the name of each parameter that this rank's own samples have given a gradient.

    Where samples choose layers, as in mixtures of experts, the ranks of a member do not use the same parameters. FSDP
    then adds up zeros in place of the missing gradients (``SETTING``), so that all ranks exchange messages of the same
    size. After that, every parameter has a gradient on every rank, also one that none of them has used, and optimizers
    would change it. A tied parameter has its first name. A step begins by clearing the set.

    Args:
        model: right after it was divided.
        divided: its layers that FSDP gathers.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    first_names = {name: first[id(parameter)] for name, parameter in every}
    prefixes = {id(layer): name for name, layer in model.named_modules()}
    watched: dict[int, torch.Tensor] = {}
    used: set[str] = set()

    def note(parameter: torch.nn.Parameter, name: str) -> None:
        register: Any = parameter.register_post_accumulate_grad_hook
        register(lambda _parameter: used.add(name))

    def watch(layer: torch.nn.Module, _arguments: Any) -> None:
        prefix = prefixes[id(layer)]
        for own, parameter in layer.named_parameters():
            if not is_divided(parameter) and parameter.requires_grad and id(parameter) not in watched:
                watched[id(parameter)] = parameter
                note(parameter, first_names[f"{prefix}.{own}".lstrip(".")])

    for layer in divided:
        layer.register_forward_pre_hook(watch)  # FSDP's own hook comes first, and has gathered the layer
    return used
