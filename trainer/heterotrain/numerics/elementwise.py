"""Optimizers that treat every element of a parameter by itself, so that a part of one can be updated alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heterotrain.errors import UsageError

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip
"""Those of torch; Adafactor and Muon look at whole matrices. Of other classes it cannot be known."""


def is_elementwise(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether all of these optimizers are known to treat every element by itself."""
    return all(type(optimizer) in ELEMENTWISE for optimizer in optimizers)


def check_elementwise(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that may need whole parameters.

    Raises:
        UsageError: one of them is not known to be elementwise.
    """
    for optimizer in optimizers:
        if type(optimizer) not in ELEMENTWISE:
            raise UsageError(
                f"the plan divides parameters among ranks, and {type(optimizer).__name__} may need whole ones: use one "
                "of torch's elementwise optimizers, such as AdamW, or parallelism Pipeline"
            )
