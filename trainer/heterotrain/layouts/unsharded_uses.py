"""Which parameters of a model that ``fully_shard`` has divided this rank's backward passes have used.

Where samples choose layers, as in mixtures of experts, the ranks of a member do not use the same parameters. FSDP then
adds up zeros in place of the missing gradients (``set_reduce_scatter_unused_params``, from PyTorch 2.15), so that all
ranks exchange messages of the same size. After that, every parameter has a gradient on every rank, also one that none
of them has used, and optimizers would change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from heterotrain.layouts.local import is_divided

SETTING = "set_reduce_scatter_unused_params"


class Uses:
    """The parameters that got a gradient from this rank's own samples since ``clear``."""

    def __init__(self, model: torch.nn.Module, divided: Sequence[torch.nn.Module]) -> None:
        """Watch a model.

        Args:
            model: right after it was divided.
            divided: its layers that FSDP gathers.
        """
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self._first_names = {name: first[id(parameter)] for name, parameter in every}
        self._prefixes = {id(layer): name for name, layer in model.named_modules()}
        self._watched: dict[int, torch.Tensor] = {}
        self._used: set[str] = set()
        for layer in divided:
            layer.register_forward_pre_hook(self._watch)  # FSDP's own hook comes first, and has gathered the layer

    def clear(self) -> None:
        """Begin a step."""
        self._used.clear()

    def __contains__(self, name: str) -> bool:
        """Return whether a backward pass has used a parameter; a tied one has its first name."""
        return name in self._used

    def _watch(self, layer: torch.nn.Module, _arguments: Any) -> None:
        prefix = self._prefixes[id(layer)]
        for own, parameter in layer.named_parameters():
            if not is_divided(parameter) and parameter.requires_grad and id(parameter) not in self._watched:
                self._watched[id(parameter)] = parameter
                self._note(parameter, self._first_names[f"{prefix}.{own}".lstrip(".")])

    def _note(self, parameter: torch.nn.Parameter, name: str) -> None:
        register: Any = parameter.register_post_accumulate_grad_hook
        register(lambda _parameter: self._used.add(name))
