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

from heterotrain.state.local import is_divided

SETTING = "set_reduce_scatter_unused_params"


def watch_uses(model: torch.nn.Module, divided: Sequence[torch.nn.Module]) -> set[str]:
    """Return a set that gets the name of each parameter that this rank's own samples have given a gradient.

    A tied parameter has its first name. A step begins by clearing the set.

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
