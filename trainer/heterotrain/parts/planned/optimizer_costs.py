"""What the script's own optimizers will cost: bytes and seconds for each byte of parameters, before the first plan.

For the bytes, they take a step on the meta device, where tensors have sizes and no memory: 2 for plain SGD, 3 with
momentum, 4 for Adam, less where a part of the model is frozen. For the seconds, they take steps with a few new tensors
on the device, shaped like the model's first parameters. How many bytes a rank will hold is not known yet, and an
update's time is in proportion to them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from heterotrain.parts.planned.processors import Moment, clocks, lasting_s

_OFF = ("fused", "foreach", "capturable")
"""Options of torch's optimizers that need a real device."""
RUNS = 5
"""Steps, the first of which does not count: it makes the optimizer's state."""
LONGEST_S = 20.0
"""Seconds after which no further step begins; two are made in any case."""
MEASURED_BYTES = 16 << 20
"""Bytes of all new tensors, more or less: with gradients and state, they are more than a processor's cache holds."""
TENSOR_BYTES = 4 << 20
"""Bytes of one new tensor at most, unless one row of it has more: some models have tensors that fill a device."""


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


def update_s_per_byte(
    optimizers: Sequence[torch.optim.Optimizer],
    whole_bytes: int,
    *,
    device: torch.device,
    processors: float = math.inf,
) -> float | None:
    """Return the seconds of an update for each byte of parameters, those included that no optimizer changes.

    Optimizers are left as they were.

    Args:
        optimizers: of the whole model's parameters, before their first step.
        whole_bytes: of all parameters.
        device: to measure on.
        processors: see ``processors.lasting_s``.

    Returns:
        ``None`` where nothing is trained, or an optimizer cannot take such steps.
    """
    measured, took_s, trained = 0, 0.0, 0
    for optimizer in optimizers:
        own = sum(p.nbytes for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        left = MEASURED_BYTES * own // max(1, whole_bytes)
        try:
            found, seconds = _measured(optimizer, left, device, processors)
        except Exception:  # noqa: BLE001  # any code of the script's optimizer
            return None
        measured, took_s, trained = measured + found, took_s + seconds, trained + own
    return took_s / measured * trained / whole_bytes if measured and whole_bytes else None


def _measured(
    optimizer: torch.optim.Optimizer, most_bytes: int, device: torch.device, processors: float
) -> tuple[int, float]:
    """Return the bytes of parameters that an optimizer has updated, and the seconds of an update."""
    now = clocks(device)
    with unchanged(optimizer):
        tensors, groups, left = [], [], most_bytes
        for group in optimizer.param_groups:
            own = []
            for tensor in _like(group["params"], device):
                if left <= 0:
                    break
                own.append(tensor)
                left -= tensor.nbytes
            tensors += own
            groups += [{**group, "params": own}] if own else []
        optimizer.param_groups = groups
        runs, start = list[Moment](), now()
        for _ in range(RUNS if tensors else 0):
            began = now()
            step_alone(optimizer)
            ended = now()
            runs.append(began.until(ended))
            if len(runs) > 1 and ended.wall_s - start.wall_s >= LONGEST_S:
                break
    return sum(tensor.nbytes for tensor in tensors), lasting_s(runs[1:], processors) if runs else 0.0


def _like(parameters: Sequence[torch.nn.Parameter], device: torch.device) -> Iterator[torch.nn.Parameter]:
    """Yield small tensors with gradients, shaped like trained parameters or their first rows."""
    for parameter in parameters:
        if not parameter.requires_grad or not parameter.nbytes:
            continue
        shape = list(parameter.shape)
        if shape:
            shape[0] = max(1, min(shape[0], shape[0] * TENSOR_BYTES // parameter.nbytes))
        tensor = torch.nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device=device))
        tensor.grad = torch.ones_like(tensor)
        yield tensor
