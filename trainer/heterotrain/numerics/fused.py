"""Fused optimizers of torch: the choice of their kernels, and steps behind a gate (``gate.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from heterotrain.exchange.gate import Gate
from heterotrain.numerics.learning_rate import step_scaled
from heterotrain.state.strides import is_dense, laid_out_like

CHOSEN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that get fused kernels where the script has left it open."""
GATED = (*CHOSEN, torch.optim.Adagrad)
"""Optimizers whose fused kernels can stay behind a gate. A subclass may do other things in its step."""


def prefer_fused(optimizer: torch.optim.Optimizer) -> None:
    """Choose fused kernels where the script has left the choice open and every parameter allows it."""
    groups = optimizer.param_groups
    if type(optimizer) not in CHOSEN or not all(_is_open(group) and _allows(group["params"]) for group in groups):
        return
    chosen: Any = optimizer
    for settings in (optimizer.defaults, *groups):
        settings["fused"] = True
    chosen._step_supports_amp_scaling = chosen._need_device_dtype_check_for_fused = True  # noqa: SLF001  # as its constructor does
    for parameter, state in optimizer.state.items():
        if "step" in state:  # fused kernels count steps on the device
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)


def _is_open(group: dict[str, Any]) -> bool:
    given = (group.get("fused"), group.get("foreach"), group.get("differentiable"), group.get("capturable"))
    first_differs = group.get("momentum") and group.get("dampening")  # ``_start_momenta`` cannot help then
    return not any(given) and given[:2] == (None, None) and not first_differs and not torch.is_tensor(group["lr"])


def _allows(parameters: Sequence[torch.Tensor]) -> bool:
    return all(
        type(p.data) is torch.Tensor and (p.is_cuda or p.is_cpu) and p.is_floating_point() and is_dense(p)
        for p in parameters
    )


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give state that belongs to a parameter the parameter's strides: fused kernels pair elements by their places.

    A parameter with gaps in its memory has no such state, and its group gets the plain kernels.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and not all(map(is_dense, group["params"])):
            group["fused"] = False
    for parameter, state in optimizer.state.items():
        for name, value in state.items() if isinstance(parameter, torch.Tensor) and isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                state[name] = laid_out_like(value, parameter)


def take_step(optimizer: torch.optim.Optimizer, factor: float, gate: Gate | None = None) -> None:
    """Take the optimizer's step with all learning rates times ``factor``; queue one that ``can_stay_behind`` a gate."""
    if gate is None:
        if type(optimizer) is torch.optim.SGD:
            _start_momenta(optimizer)
        step_scaled(optimizer, factor)
        return
    gated: Any = optimizer
    gated.found_inf, gated.grad_scale = gate.closed, gate.divisor
    try:
        step_scaled(optimizer, factor)
    finally:
        del gated.found_inf, gated.grad_scale


def _start_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that get their first gradient late a momentum of zero; else torch's fused SGD fails on them."""
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"] and not group["dampening"]:
            state = optimizer.state.items()  # by id, because a parameter as a key is hashed by a call
            known = {id(parameter) for parameter, own in state if own.get("momentum_buffer") is not None}
            graded, new = 0, []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    graded += 1
                    if id(parameter) not in known:
                        new.append(parameter)
            for parameter in new if len(new) < graded else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def can_stay_behind(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether a step of these optimizers behind a closed gate leaves no trace, and reads nothing.

    The first step of fused SGD does not read its momentum, so behind a closed gate it would leave a random one. Hooks
    of the script would run although the step is repeated; the library's own is the one before the step.
    """
    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:  # noqa: SLF001  # torch has no public list
        return False
    for optimizer in optimizers:
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001  # as above
        if type(optimizer) not in GATED or len(before) > 1 or after:
            return False
        for group in optimizer.param_groups:
            if not group.get("fused") or torch.is_tensor(group["lr"]):
                return False
            needed = "step" if "momentum" not in group else "momentum_buffer" if group["momentum"] else ""
            for parameter in group["params"] if needed else ():
                if parameter.grad is not None and optimizer.state.get(parameter, {}).get(needed) is None:
                    return False
    return True
