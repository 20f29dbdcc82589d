"""A rank's part of a model that ``fully_shard`` has divided, for the code that captures, sends and restores state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from heterotrain.state.holdings import Holding
from heterotrain.state.layout import Shapes
from heterotrain.state.local import holding, is_divided, local


class ShardedModel:
    """The layout (``state.layout.Layout``) of a rank in a sharded member."""

    def __init__(self, model: torch.nn.Module, uses: set[str] | None = None) -> None:
        """Describe a model right after it was divided.

        Its parameters are listed once: while the model computes, torch puts gathered copies in their places.

        Args:
            model: the model.
            uses: as in ``state.layout.Layout``.
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
