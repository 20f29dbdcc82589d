"""Checks of the objects that a script registers: unusable ones are refused at once, with what to do instead."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import torch

from heterotrain.errors import UsageError

_C = TypeVar("_C", bound=StrEnum)

MAX_SHAPES_SHOWN = 3
"""Shapes listed in a message at most."""
NUMBER_LIMIT = 2**63
"""Exclusive upper limit of integers: random generators accept no larger seed."""


def whole_number(name: str, value: Any, *, least: int) -> int:
    """Return an integer given by a script as a Python ``int``.

    Raises:
        UsageError: the value is not an integer, a truth value, below ``least``, or at least 2^63.
    """
    try:
        found = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = least - 1
    if found < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if found >= NUMBER_LIMIT:
        raise UsageError(f"{name} must be a whole number below 2^63, not {value!r}")
    return found


def check_model(model: Any, *, has_values: bool = True) -> None:
    """Refuse objects that are not models, and models whose gradients cannot be added up over ranks.

    Args:
        model: the object.
        has_values: whether its parameters need values already.

    Raises:
        UsageError: the object is one of these.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"job.wrap takes a torch.nn.Module, not a {type(model).__name__}")
    for name, layer in model.named_modules():
        what = f"layer {name!r} is" if name else "the model is"
        if isinstance(layer, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            raise UsageError(
                f"{what} a {type(layer).__name__}: give job.wrap the model inside it; "
                "job.wrap itself adds up gradients over ranks"
            )
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.sparse:
            raise UsageError(f"{what} a {type(layer).__name__} with sparse gradients: leave out sparse=True")
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.max_norm is not None:
            raise UsageError(
                f"{what} a {type(layer).__name__} with max_norm, which changes weights in forward passes, so ranks "
                "with other samples would train other weights: leave out max_norm=, and limit the rows after "
                "step.apply, with torch.no_grad(): weight.copy_(torch.renorm(weight, 2, 0, max_norm))"
            )
        for own, value in layer.named_buffers(recurse=False):
            if value is not None and (value.layout is not torch.strided or value.is_nested):
                raise UsageError(
                    f"buffer {f'{name}.{own}' if name else own!r} is sparse or nested, which no checkpoint can hold: "
                    "keep it as an attribute of the model, or register its indices and values as buffers"
                )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet: "
                "run the model on one batch before job.wrap, or leave out lazy layers"
            )
        if parameter.is_meta and has_values:
            raise UsageError(
                f"parameter {name!r} is on the meta device and has no values: "
                "call model.to_empty(device=…) and initialise it before job.wrap"
            )
        if parameter.is_complex():
            raise UsageError(
                f"parameter {name!r} is complex: "
                "store real and imaginary parts as real numbers, as torch.view_as_real does"
            )


def check_optimizer(optimizer: Any) -> None:
    """Refuse objects that are not optimizers, and optimizers that run the model themselves.

    Raises:
        UsageError: the object is one of these.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"job.optimizer takes a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("SparseAdam needs sparse gradients, and those of a job are dense: use torch.optim.Adam")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UsageError(
            f"{name} does not call the constructor of torch.optim.Optimizer: let it call "
            "super().__init__(groups, defaults), where a wrapper gives the groups of its optimizer, and keep all its "
            "tensors in self.state, because that goes to joining ranks and into checkpoints"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{name} runs the model several times in a step, "
            "so the step cannot be committed by all ranks or none: use an optimizer whose step() needs no closure"
        )


def check_scheduler(scheduler: Any) -> None:
    """Refuse schedulers that cannot be stepped once for each committed step.

    Raises:
        UsageError: the object is one of these.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau follows a metric, not steps: give it to job.register(name, scheduler). "
            "Step it in a hook of job.on_epoch_end, with a metric from job.sum, which is the same on every rank"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise UsageError(f"job.scheduler takes a learning-rate scheduler, not a {type(scheduler).__name__}")
    check_stateful("job.scheduler", scheduler)


def check_schedules(optimizers: Iterable[torch.optim.Optimizer], registered: Iterable[Any]) -> None:
    """Refuse optimizers with a learning-rate scheduler that is not registered: after a resume it would begin again.

    Args:
        optimizers: of the job; torch marks those that a scheduler was made for.
        registered: all that the job saves, schedulers among it.

    Raises:
        UsageError: there is such an optimizer.
    """
    held = [each for thing in registered for each in (thing, *getattr(thing, "__dict__", {}).values())]
    known = {id(getattr(each, "optimizer", None)) for each in held}
    for optimizer in optimizers:
        if getattr(optimizer.step, "_wrapped_by_lr_sched", False) and id(optimizer) not in known:
            raise UsageError(
                f"{type(optimizer).__name__} has a learning-rate scheduler that the job does not know, so it would "
                "begin again after a resume and on a rank that joins: pass it to job.scheduler, which steps it once in "
                "each step, and leave out scheduler.step(); or to job.register(name, scheduler), and step it in a hook"
            )


def check_stateful(who: str, thing: Any) -> None:
    """Refuse objects whose state cannot be transferred.

    Args:
        who: the called method, for the message.
        thing: its argument.

    Raises:
        UsageError: the object lacks ``state_dict`` or ``load_state_dict``, or scales losses as the job does.
    """
    if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled():
        raise UsageError(
            f"{who} got a GradScaler, which fails on a rank without samples: leave it out. With precision fp16 the job "
            "scales losses alike on all ranks, and step.apply skips a step that overflows"
        )
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise UsageError(
                f"{who} takes an object with state_dict() and load_state_dict(), not a {type(thing).__name__}"
            )


def check_belongs(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], *, earlier: Collection[int] = ()
) -> None:
    """Refuse optimizers of parameters outside the model, whose gradients would not be added up over ranks.

    An optimizer may keep parameters that have been replaced in the model, if it or another one has the new ones, too.

    Args:
        model: the model.
        optimizers: the optimizers.
        earlier: ``id`` of each parameter that was in the model before.

    Raises:
        UsageError: there is such a parameter, and it requires a gradient; or parameters were replaced, and the
            optimizers have only the old ones.
    """
    known = {id(parameter) for parameter in model.parameters()}
    held = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if any(key in earlier and key not in known for key in held):
        new = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held and id(p) not in earlier]
        if new:
            raise UsageError(
                f"{len(new)} parameters were replaced ({', '.join(new[:MAX_SHAPES_SHOWN])}), but the optimizers still "
                "have the old ones, so nothing would train the new ones: call optimizer.add_param_group({'params': …}) "
                "with them, or freeze them; load weights without assign=True"
            )
    for optimizer in optimizers:
        given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        strange = [tuple(p.shape) for p in given if id(p) not in known and id(p) not in earlier]
        if strange:
            shown = ", ".join(map(str, strange[:MAX_SHAPES_SHOWN])) + (", …" if strange[MAX_SHAPES_SHOWN:] else "")
            name = type(optimizer).__name__
            raise UsageError(
                f"{len(strange)} of the {len(given)} parameters of {name} are not in the model that job.wrap got "
                f"(shapes {shown}): "
                "make the optimizer from that model's parameters, and put several models into one torch.nn.ModuleDict"
            )


def check_loss(loss: Any) -> None:
    """Refuse losses that ``step.backward`` cannot start from.

    Raises:
        UsageError: the loss is not a tensor of one element, or does not depend on trained parameters.
    """
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"step.backward needs a scalar loss, a tensor, not {_shown(loss)}")
    if loss.numel() != 1:
        raise UsageError(f"step.backward needs a scalar loss, not one of shape {tuple(loss.shape)}: take its mean")
    if not loss.requires_grad:
        raise UsageError(
            "the loss of step.backward depends on no parameter that requires a gradient: "
            "compute it from the model's output, without detach(), item() or torch.no_grad()"
        )


def check_weight(weight: Any) -> None:
    """Refuse invalid weights of a micro-batch; ``None`` stands for its number of samples.

    Raises:
        UsageError: the weight is not a number, negative, or not finite.
    """
    if weight is None:
        return
    several = isinstance(weight, torch.Tensor) and weight.numel() != 1
    if several or not 0 <= weight < math.inf:
        raise UsageError(f"the weight of a micro-batch must be a finite number of at least 0, not {_shown(weight)}")


def choice(name: str, value: Any, kind: type[_C]) -> _C:
    """Return the setting as a member of ``kind``; its case does not matter.

    Raises:
        UsageError: it is not one of the choices.
    """
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"{name} {value!r} is unknown: choose one of {', '.join(kind)}") from None


def plain_numbers(who: str, values: Any) -> dict[str, float]:
    """Return the values that a script reports as Python floats, by name.

    Args:
        who: the called method, for the message.
        values: numbers or tensors of one element.

    Raises:
        UsageError: the argument is not a mapping, or a value is not a number.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            f"{who} takes numbers by name, {{'accuracy': 0.9}} for instance, not a {type(values).__name__}"
        )
    found = {}
    for name, value in values.items():
        try:
            found[str(name)] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(f"{who}: {name} must be one number, not {_shown(value)}") from None
    return found


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def check_hook(who: str, hook: Any, argument: str) -> None:
    """Refuse a hook that cannot be called with its one argument.

    Raises:
        UsageError: it cannot.
    """
    if not callable(hook):
        raise UsageError(f"{who} takes a function of one argument, {argument}, not {_shown(hook)}")
    try:
        inspect.signature(hook).bind(0)
    except TypeError:
        raise UsageError(f"{who} calls its hook with one argument: write def {hook.__name__}({argument})") from None
    except ValueError:  # of a built-in function
        return


def check_default_device() -> None:
    """Refuse ``torch.set_default_device``: the library's own tensors would be on that device, too.

    Raises:
        UsageError: the default is not the host's memory.
    """
    device = torch.get_default_device()
    if device.type != "cpu":
        raise UsageError(
            f"torch.set_default_device({str(device)!r}) is in force: leave it out, because job.wrap moves the model "
            "and job.steps moves batches to job.device; or end it before job.wrap"
        )
