"""Seconds of the script's own optimizers for each byte of parameters, measured before the first plan.

The optimizers take steps with a few new tensors on the device, shaped like the model's first parameters. How many bytes
a rank will hold is not known yet, and an update's time is in proportion to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from heterotrain.parts.planned.processors import Moment, clocks, lasting_s
from heterotrain.parts.planned.training_state import step_alone, unchanged

RUNS = 5
"""Steps, the first of which does not count: it makes the optimizer's state."""
LONGEST_S = 20.0
"""Seconds after which no further step begins; two are made in any case."""
MEASURED_BYTES = 16 << 20
"""Bytes of all new tensors, more or less: with gradients and state, they are more than a processor's cache holds."""
TENSOR_BYTES = 4 << 20
"""Bytes of one new tensor at most, unless one row of it has more: some models have tensors that fill a device."""


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
        processors: see ``lasting_time.lasting_s``.

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
