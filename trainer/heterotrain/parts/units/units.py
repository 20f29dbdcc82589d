"""A model as a sequence of units, the smallest parts that can be placed on a device.

The units of ``torch.nn.Sequential`` are its layers. Of another model, a list of layers named by the script gives the
middle units; what its ``forward`` computes before the list is the first unit, and what it computes after it the last
one. ``trace.trace`` checks that the model is such a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from heterotrain_core.units import AFTER, BEFORE

from heterotrain.errors import UsageError

_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001  # torch has no public base class


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model.

    Attributes:
        model: the whole model.
        path: name of the list of layers; empty for ``torch.nn.Sequential``.
        layers: the units that are layers.
        names: of all units, in the order of computation.
    """

    model: torch.nn.Module
    path: str
    layers: tuple[torch.nn.Module, ...]
    names: tuple[str, ...]

    @property
    def first_layer(self) -> int:
        """Number of the unit that is the first of ``layers``."""
        return 1 if self.path else 0

    @property
    def parts(self) -> dict[str, torch.nn.Module]:
        """The layers that are held or not held as a whole, by name: the units, and those around the list."""
        found: dict[str, torch.nn.Module] = {}
        _collect(self.model, "", self.path, found)
        return found


def units_of(model: torch.nn.Module, path: str | None) -> Units:
    """Return the model's units.

    Args:
        model: the whole model.
        path: name of a ``torch.nn.ModuleList`` or ``torch.nn.Sequential`` in it, such as ``transformer.h``; ``None``
            for a model that is a ``torch.nn.Sequential``.

    Raises:
        UsageError: there is no such list, or a layer occurs in it twice.
    """
    if not path:
        if type(model).forward is not torch.nn.Sequential.forward:
            raise UsageError(
                f"a {type(model).__name__} is not a sequence of layers: name its list of layers, for example "
                'job.wrap(build_model, units="blocks"), or make it a torch.nn.Sequential'
            )
        layers, prefix = _children(model), ""
    else:
        layers, prefix = _children(_listed(model, path)), f"{path}."
    if not layers:
        raise UsageError("a model needs at least one unit, and its list of layers is empty")
    if len({id(layer) for _, layer in layers}) < len(layers):
        raise UsageError("a layer occurs twice in the list: copy it, and tie the parameters of the copies")
    names = [f"{prefix}{name}" for name, _ in layers]
    if path:
        names = [f"{BEFORE}{path}", *names, f"{AFTER}{path}"]
    return Units(model=model, path=path or "", layers=tuple(layer for _, layer in layers), names=tuple(names))


def check_cut(names: Sequence[str], cuts: Sequence[int]) -> None:
    """Refuse a cut that leaves a stage without a unit.

    Args:
        names: of all units.
        cuts: the first unit of each stage, and the number of units at the end.

    Raises:
        UsageError: the cut is not one.
    """
    check_number(names, len(cuts) - 1)
    ends = cuts[0] == 0 and cuts[-1] == len(names) if cuts else False
    if not ends or any(later <= earlier for earlier, later in pairwise(cuts)):
        raise UsageError(
            f"stages cannot begin at units {list(cuts[:-1])} of {len(names)}: each needs at least one, and all workers "
            "the same model"
        )


def check_number(names: Sequence[str], stages: int) -> None:
    """Refuse more stages than units.

    Raises:
        UsageError: there are.
    """
    if stages > len(names):
        raise UsageError(
            f"{stages} stages are too many for a model of {len(names)} units: use fewer workers in a member, or fewer "
            "processes with torchrun, or a finer list of layers"
        )


def check_stages(model: torch.nn.Module) -> None:
    """Refuse models that stages cannot compute exactly.

    Raises:
        UsageError: it has a layer whose output depends on other micro-batches, or is compiled.
    """
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise UsageError(
            "a compiled model cannot be cut into stages: give job.wrap the model itself, and compile_units=True"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, _BATCH_NORM):
            raise UsageError(
                f"layer {name!r} is a {type(layer).__name__}, whose statistics need the whole batch at once, and a "
                "pipeline computes it in parts: use LayerNorm or GroupNorm"
            )


def _children(layers: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the layers of a list; ``named_children`` would leave out repeated ones."""
    return [(name, layer) for name, layer in layers._modules.items() if layer is not None]  # noqa: SLF001  # repeated layers count here


def _listed(model: torch.nn.Module, path: str) -> torch.nn.Module:
    lists = [name for name, layer in model.named_modules() if name and isinstance(layer, torch.nn.ModuleList)]
    try:
        found = model.get_submodule(path)
    except AttributeError:
        found = None
    if not isinstance(found, torch.nn.ModuleList | torch.nn.Sequential):
        have = f"it has {', '.join(map(repr, lists))}" if lists else "it has none"
        raise UsageError(f"units={path!r} is not a list of layers of {type(model).__name__}: {have}")
    return found


def _collect(layer: torch.nn.Module, name: str, path: str, found: dict[str, torch.nn.Module]) -> None:
    """Walk down to the units; what hangs beside the way is a part of its own."""
    on_the_way = name == path or not name or path.startswith(f"{name}.")
    if not on_the_way:
        found[name] = layer
        return
    for child_name, child in layer.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if name == path:
            found[full] = child
        else:
            _collect(child, full, path, found)
