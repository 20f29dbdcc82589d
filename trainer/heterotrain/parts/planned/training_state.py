"""Bytes of training state for each byte of parameters: what the script's own optimizers will hold.

The optimizers take a step on the meta device, where tensors have sizes and no memory. So it is known before the first
plan, for plain SGD (2), with momentum (3), for Adam (4), and for models of which a part is frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_OFF = ("fused", "foreach", "capturable")
"""Options of torch's optimizers that need a real device."""


def state_ratio(
    units: Sequence[Sequence[torch.nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer]
) -> float | None:
    """Return bytes of parameters, gradients and optimizer state over those of parameters, at least 1.

    It is that of the unit for which it is largest: a stage may hold units that are trained while others are frozen.
    Optimizers are left as they were.

    Args:
        units: parameters of each unit, on the meta device.
        optimizers: of these parameters, before their first step.

    Returns:
        ``None`` where an optimizer cannot take a step without values, or no unit has parameters.
    """
    sizes: dict[int, int] = {}
    for optimizer in optimizers:
        try:
            with _tried(optimizer):
                for parameter, state in optimizer.state.items():
                    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
                    sizes[id(parameter)] = sum(value.nbytes for value in tensors)
        except Exception:  # noqa: BLE001  # any code of the script's optimizer
            return None
    ratios = []
    for unit in units:
        own = list({id(p): p for p in unit}.values())
        held = sum(p.nbytes for p in own)
        if held:
            more = sum((p.nbytes if p.requires_grad else 0) + sizes.get(id(p), 0) for p in own)
            ratios.append((held + more) / held)
    return max(ratios, default=None)


@contextmanager
def _tried(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take a step; afterwards restore state, groups and gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter.is_meta for parameter in parameters):
        raise ValueError("the parameters have values")
    with unchanged(optimizer):
        for group in optimizer.param_groups:
            group.update({name: False for name in _OFF if group.get(name) is not None})
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        step_alone(optimizer)
        yield


def step_alone(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without hooks, and unseen by learning-rate schedulers."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


@contextmanager
def unchanged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore an optimizer's state and groups after the block, and the gradients of its parameters."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    kept = [{name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups]
    members = [group["params"] for group in groups]
    state = {parameter: copy.deepcopy(value) for parameter, value in optimizer.state.items()}
    gradients = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, before, own in zip(groups, kept, members, strict=True):
            for name in [name for name in group if name != "params" and name not in before]:
                del group[name]
            group.update(before, params=own)
        optimizer.state.clear()
        optimizer.state.update(state)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
