"""Options of one unit of a model: activations computed twice, and a compiled forward pass.

The unit stays the same object with the same names of parameters, so its state can be read by a job without the option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_NORM = torch.nn.modules.batchnorm._NormBase  # noqa: SLF001  # torch has no public base class of BatchNorm and InstanceNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """Options of ``job.wrap``, which documents them."""

    checkpoint_units: bool = False
    compile_units: bool = False
    keep_gathered: bool = False
    offload: bool = False
    graphs: bool = False
    weights: str | None = None


DEFAULT = WrapOptions()


def prepare_units(units: Iterable[torch.nn.Module], options: WrapOptions) -> None:
    """Checkpoint and compile the forward passes of units, as the options say."""
    for unit in units:
        if options.checkpoint_units:
            checkpointed(unit)
        if options.compile_units:
            compiled(unit)


def checkpointed(unit: torch.nn.Module) -> torch.nn.Module:
    """Compute the unit's activations again in the backward pass in place of keeping them; return the unit."""
    kind: Any = type(unit)

    def forward(self: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        return checkpoint(kind.forward, self, *arguments, use_reentrant=False, **options)

    return _with_forward(unit, _CHECKPOINTED, lambda: forward)


def checkpoint_more(units: Iterable[torch.nn.Module]) -> bool:
    """Checkpoint all of these units that can be, in the middle of a training; return whether there was one.

    A unit stays as it is where a second forward pass would change its state, because gradients would not be exact then:
    running statistics, and weights that are computed from others (parametrizations such as ``spectral_norm``).
    """
    found = [unit for unit in units if not getattr(unit, _CHECKPOINTED, False) and _repeatable(unit)]
    for unit in found:
        checkpointed(unit)
    return bool(found)


def _repeatable(unit: torch.nn.Module) -> bool:
    return not any(
        isinstance(layer, torch.jit.ScriptModule)  # its class cannot be replaced
        or (isinstance(layer, _NORM) and layer.track_running_stats)
        or hasattr(layer, "parametrizations")
        for layer in unit.modules()
    )


def compiled(unit: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Compile the unit's forward pass; return the unit. ``options`` are those of ``torch.compile``."""
    kind: Any = type(unit)
    return _with_forward(unit, IS_COMPILED, lambda: torch.compile(kind.forward, **options))


_CHECKPOINTED = "_heterotrain_checkpointed"
"""Attribute of the classes of checkpointed units."""
IS_COMPILED = "_heterotrain_compiled"
_CLASSES: dict[tuple[type[torch.nn.Module], str], type[torch.nn.Module]] = {}
"""Classes made here: units of one class share one, and so one compiled function."""


def _with_forward(unit: torch.nn.Module, what: str, make: Callable[[], Any]) -> torch.nn.Module:
    kind = type(unit)
    if (kind, what) not in _CLASSES:
        _CLASSES[kind, what] = type(
            kind.__name__, (kind,), {"forward": make(), "__module__": kind.__module__, what: True}
        )
    unit.__class__ = _CLASSES[kind, what]
    return unit
