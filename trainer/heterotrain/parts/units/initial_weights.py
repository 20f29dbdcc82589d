"""Initial weights of a model that was built on the meta device, so that no rank needs memory for parts it lacks.

Each layer's ``reset_parameters`` runs on the CPU with a seed made from the job's seed and the layer's name. So the
values of a unit are the same on every rank and device, whatever else that rank holds. A layer's own
``reset_parameters`` runs after those of the layers in it, and may replace their values.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heterotrain.errors import UsageError
from heterotrain.parts.units.draws import seed_of
from heterotrain.parts.units.units import Units
from heterotrain.parts.units.weight_files import PretrainedWeights

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods that give a layer its initial values; torch's own layers have one of them."""

_DRAWING = threading.Lock()
"""Held while layers draw: torch's global generator, which they use, is the same for all threads."""


def built(factory: Callable[[], Any]) -> torch.nn.Module:
    """Return the factory's model, built on the meta device.

    Raises:
        UsageError: it returned something else, needs arguments or values of tensors, or gave its weights values by
            itself, which are lost on that device.
    """
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(
            f"job.wrap calls the function that builds the model without arguments, and this one cannot be called so "
            f"({error}): job.wrap(lambda: build_model(...))"
        ) from None
    except ValueError:  # a function without a signature
        pass
    try:
        with torch.device("meta"), _Writes() as writes:
            model = factory()
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise UsageError(
            f"the model is built without memory, which fails here ({first_line(error)}): leave .to(device) and loaded "
            "weights out of the function, and take no values out of tensors in it"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"job.wrap got a function that returns a {type(model).__name__}: return a torch.nn.Module")
    if writes.found:
        raise UsageError(
            f"the model is built without memory, so {writes.found} has no effect: initialise weights in a method "
            "reset_parameters() of the layer that has them"
        )
    _check_tensors(model)
    return model


def copied(layer: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a layer or model.

    Raises:
        UsageError: it has something that cannot be copied.
    """
    try:
        return copy.deepcopy(layer)
    except TypeError as error:
        raise UsageError(
            f"the model cannot be copied, and stages are made from copies ({first_line(error)}): keep locks, files and "
            "generators out of its layers"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; torch adds whole stacks to some."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """The values with which a model on the meta device begins; nothing is drawn from outside.

    Attributes:
        seed: of the job.
        device: where the values go.
        weights: values from files, which take the place of the layers' own; ``None`` for none.
    """

    seed: int
    device: torch.device
    weights: PretrainedWeights | None = None

    def fill_unit(self, units: Units, unit: torch.nn.Module | None) -> None:
        """Give a unit its values, or with ``None`` all that is still without values; see ``fill``."""
        self.fill(units, None if unit is None else [name for name, layer in units.parts.items() if layer is unit])

    def fill(self, units: Units, parts: Collection[str] | None = None, *, with_parameters: bool = True) -> None:
        """Give parameters and buffers on the meta device memory and their initial values.

        Args:
            units: of the whole model.
            parts: names in ``Units.parts`` that this rank holds; ``None`` for all.
            with_parameters: whether parameters get values. Otherwise they get one element of memory, not a number,
                which stands for all; nothing can be written into it.

        Raises:
            UsageError: a layer does not say how its parameters begin.
        """
        known, device, weights = units.parts, self.device, self.weights
        _check_between(units)
        first_names = {id(p): name for name, p in units.model.named_parameters()}  # a tied parameter has its first name
        part_of = {f"{part}.{name}": part for part, layer in known.items() for name, _ in layer.named_parameters()}
        values: dict[str, dict[str, torch.Tensor]] = {}
        made: dict[int, torch.nn.Parameter] = {}

        def value(part: str, name: str, like: torch.Tensor) -> torch.Tensor:
            if weights is not None and name in weights.names:
                return weights.read(name, dtype=like.dtype).to(device)
            if part not in values:
                values[part] = _values(known[part], part, self.seed)
            return values[part][name].to(device)

        def begin(parameter: torch.nn.Parameter) -> torch.Tensor:
            if not with_parameters:
                return torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
            name = first_names[id(parameter)]
            return value(part_of[name], name, parameter)

        for part in known if parts is None else parts:
            values.clear()  # no more than a part and what it is tied to is in memory twice
            for layer_name, layer in known[part].named_modules(prefix=part):
                for own, parameter in layer._parameters.items():  # noqa: SLF001  # torch has no public way to replace it
                    if parameter is None or not parameter.is_meta:
                        continue
                    if id(parameter) not in made:
                        new = torch.nn.Parameter(begin(parameter), requires_grad=parameter.requires_grad)
                        made[id(parameter)] = new
                    setattr(layer, own, made[id(parameter)])  # recurrent layers have lists of their parameters, too
                for own, buffer in layer._buffers.items():  # noqa: SLF001  # as above
                    if buffer is not None and buffer.is_meta:
                        layer._buffers[own] = value(part, f"{layer_name}.{own}", buffer)  # noqa: SLF001  # as above


def _values(layer: torch.nn.Module, prefix: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the initial values of a part's parameters and buffers by full name, on the CPU."""
    made = copied(layer).to_empty(device="cpu")
    for tensor in (*made.parameters(), *made.buffers()):
        _mark(tensor)
    with _DRAWING:
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                for name, inner in reversed(list(made.named_modules(prefix=prefix))):
                    _reset(inner, name, seed)
        finally:
            torch.set_rng_state(state)
    found = {**dict(made.named_parameters(prefix=prefix)), **dict(made.named_buffers(prefix=prefix))}
    for name, tensor in found.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise UsageError(f"reset_parameters() leaves {name!r} without values: set all of its elements there")
    return {name: tensor.detach() for name, tensor in found.items()}


@torch.no_grad()
def _mark(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.zero_()


def _reset(layer: torch.nn.Module, name: str, seed: int) -> None:
    reset = next((found for method in RESETS if callable(found := getattr(layer, method, None))), None)
    if reset is not None:
        torch.default_generator.manual_seed(seed_of(seed, "weights", name))
        reset()
        return
    own = [key for key, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
    if own:
        raise UsageError(
            f"layer {name!r} ({type(layer).__name__}) has {own[0]!r} but no reset_parameters(), and job.wrap builds "
            "the model without memory: add that method to set initial values"
        )


def _check_tensors(model: torch.nn.Module) -> None:
    """Refuse tensors that would get no values, and parameters that were not made by the function."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise UsageError(
                f"parameter {name!r} was made elsewhere, on {parameter.device}, and might differ on other workers: "
                "build all layers in the function that job.wrap gets, and leave out device="
            )
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, layer in model.named_modules():
        for key, value in vars(layer).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            if any(
                isinstance(leaf, torch.Tensor) and leaf.is_meta and id(leaf) not in known for leaf in tree_leaves(value)
            ):
                raise UsageError(
                    f"{f'layer {name!r}' if name else 'the model'} ({type(layer).__name__}) keeps in {key!r} a tensor "
                    "that is no parameter and no buffer, and job.wrap builds the model without memory: make it in "
                    "forward, or make it a buffer that reset_parameters() sets"
                )


def _check_between(units: Units) -> None:
    """Refuse parameters of the layers that only contain units: no stage would hold them."""
    names = [""]
    for word in units.path.split(".") if units.path else []:
        names.append(f"{names[-1]}.{word}".lstrip("."))
    for name in names:
        layer = units.model.get_submodule(name)
        for own, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            raise UsageError(
                f"{own!r} belongs to {f'layer {name!r}' if name else 'the model'} itself, outside of all units: put "
                "it into a layer of its own"
            )


class _Writes(TorchDispatchMode):
    """Notices that values are written outside of ``RESETS``.

    Attributes:
        found: what was called and where; empty for nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and not self.found:  # noqa: SLF001  # as torch's own modes
            frame: Any = sys._getframe(1)  # noqa: SLF001  # the caller is what counts
            script = None
            while frame is not None and frame.f_code.co_name not in RESETS:
                inside = frame.f_globals.get("__name__", "").partition(".")[0] in {"torch", "heterotrain"}
                script = script or (None if inside else frame)
                frame = frame.f_back
            if frame is None and script is not None and script.f_code.co_name != built.__name__:
                self.found = f"{func._schema.name.partition('::')[2]}() in {script.f_code.co_name}()"  # noqa: SLF001  # operators have no public name
        return func(*args, **(kwargs or {}))
