"""Options of one unit of a model: activations computed twice, and a compiled forward pass.

The unit stays the same object with the same names of parameters, so its state can be read by a job without the option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def checkpointed(unit: torch.nn.Module) -> torch.nn.Module:
    """Compute the unit's activations again in the backward pass in place of keeping them; return the unit."""
    kind: Any = type(unit)

    def forward(self: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        return checkpoint(kind.forward, self, *arguments, use_reentrant=False, **options)

    return _with_forward(unit, "checkpointed", lambda: forward)


def compiled(unit: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Compile the unit's forward pass; return the unit. ``options`` are those of ``torch.compile``."""
    kind: Any = type(unit)
    return _with_forward(unit, "compiled", lambda: torch.compile(kind.forward, **options))


_CLASSES: dict[tuple[type[torch.nn.Module], str], type[torch.nn.Module]] = {}
"""Classes made here: units of one class share one, and so one compiled function."""


def _with_forward(unit: torch.nn.Module, what: str, make: Callable[[], Any]) -> torch.nn.Module:
    kind = type(unit)
    if (kind, what) not in _CLASSES:
        _CLASSES[kind, what] = type(kind.__name__, (kind,), {"forward": make(), "__module__": kind.__module__})
    unit.__class__ = _CLASSES[kind, what]
    return unit
