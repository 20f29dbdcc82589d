"""State and parameter groups of optimizers by the parameters' names.

So ranks with other groups, or with other parts of the model, can take over a state. A script may add groups while it
trains: for layers that it thaws, or for a new head. A rank that joins or resumes starts from the script's beginning,
without these groups. The state names the parameters of each group, and the rank makes the same groups before it
restores the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from heterotrain.state.layout import ModelLayout
from heterotrain.state.strides import laid_out_like
from heterotrain.state.tensors import TensorShard, elements_in

_log = logging.getLogger(__name__)

GROUPS = "groups"
"""Settings of each group of parameters, and their ``NAMES``."""
NAMES = "names"
STATE = "state"
"""State of each parameter by its name."""
OTHER = "other"
"""State that an optimizer keeps for no parameter."""

KERNELS = ("foreach", "fused")
"""Settings that say which kernels compute an update: each rank keeps its own, because they depend on the device."""

COMPILED = "_orig_mod."
"""What ``torch.compile`` puts before the names of a model."""
Part = Callable[[str, torch.Tensor], torch.Tensor | TensorShard | None]
"""Returns what this rank holds of a tensor in the state of the named parameter; ``None`` for nothing."""


def capture(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], part: Part = lambda _name, tensor: tensor
) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, and each group's settings with the names of its parameters.

    Parameters that are no longer in the model are left out: they get no gradient, and no other rank has them. An
    optimizer whose state has a form of its own keeps that form.

    Args:
        optimizer: the optimizer.
        names: the model's parameters' names by ``id``.
        part: see ``Part``.
    """
    saved: dict[str, Any] = dict(optimizer.state_dict())
    groups = saved.get("param_groups")
    named = names_of(optimizer, names)
    if not isinstance(groups, list) or [len(g["params"]) for g in groups] != [len(n) for n in named]:
        return saved
    found = _by_name(saved, named)
    states: dict[str, dict[str, Any]] = {}
    for name, state in found[STATE].items():
        own = {key: part(name, value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        states[name] = {key: value for key, value in own.items() if value is not None or state[key] is None}
        if len(states[name]) < len(own):  # other ranks hold this parameter
            del states[name]
    found[STATE] = states
    return found


def names_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters; empty text for one that is not in the model."""
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def restore(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], layout: ModelLayout) -> None:
    """Restore a captured state, after making the groups that it has.

    Args:
        optimizer: the optimizer.
        saved: what ``capture`` returned, here or on a rank with another part of the model.
        layout: the model; parameters that it does not have are left out.

    Raises:
        ValueError: the state does not belong to this optimizer.
    """
    state = dict(saved)
    if GROUPS not in state:
        optimizer.load_state_dict(_with_own_kernels(optimizer, state))
        return
    parameters = dict(layout.named_parameters())
    elsewhere = set(layout.shapes) - set(parameters)
    wanted = [[name for name in group[NAMES] if name not in elsewhere] for group in state[GROUPS]]
    names_by_id = {id(parameter): name for name, parameter in parameters.items()}
    own = names_of(optimizer, names_by_id)
    if wanted != own and _extends(own, wanted) and _known(wanted, parameters):
        for group, names in zip(optimizer.param_groups, wanted, strict=False):
            group["params"] = [parameters[name] for name in names]
        for names in wanted[len(own) :]:
            optimizer.add_param_group({"params": [parameters[name] for name in names]})
        own = names_of(optimizer, names_by_id)
        _log.info("%s has the parameter groups of the state to continue from", type(optimizer).__name__)
    if [sorted(names) for names in own] != [sorted(names) for names in wanted]:
        raise ValueError("other parameters, or in other groups")
    numbered = _with_own_kernels(optimizer, _numbered(state, own, parameters, layout))
    optimizer.load_state_dict(numbered)
    _put_back_formats(optimizer, numbered["state"])
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, torch.Tensor):  # a transfer and a checkpoint hold elements row by row
            values.update({
                key: laid_out_like(value, parameter) for key, value in values.items() if isinstance(value, torch.Tensor)
            })  # fmt: skip


def _with_own_kernels(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in torch's own form with this rank's choice of kernels, which also decides where counts lie."""
    if len(state.get("param_groups", ())) != len(optimizer.param_groups):
        return state  # torch refuses it
    groups = [
        saved | {key: own[key] for key in KERNELS if key in own}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return state | {"param_groups": groups}


def _put_back_formats(optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> None:
    """Give integers of an optimizer's state their own format again: torch casts them to that of their parameter.

    An optimizer with a ``load_state_dict`` of its own does what it does.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in saved.get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            integers = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
            if integers and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device, copy=True)


def _by_name(saved: Mapping[str, Any], named: list[list[str]]) -> dict[str, Any]:
    """Return torch's own form with names in place of numbers."""
    name_of = {
        place: name
        for group, own in zip(saved["param_groups"], named, strict=True)
        for place, name in zip(group["params"], own, strict=True)
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {NAMES: [name for name in own if name]}
        for group, own in zip(saved["param_groups"], named, strict=True)
    ]
    state = {name: saved["state"][place] for place, name in name_of.items() if name and place in saved["state"]}
    other = {key: value for key, value in saved["state"].items() if key not in name_of}
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return rest | {GROUPS: groups, STATE: state, OTHER: other}


def _numbered(
    saved: Mapping[str, Any], own: list[list[str]], parameters: Mapping[str, torch.nn.Parameter], layout: ModelLayout
) -> dict[str, Any]:
    """Return torch's own form, with the numbers that the optimizer's parameters have."""
    numbers = {name: number for number, name in enumerate(name for names in own for name in names)}
    state: dict[Any, Any] = dict(saved[OTHER])
    shapes, holding = layout.shapes, layout.holding

    def of_own_kind(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor | TensorShard) or tuple(value.shape) != shapes[name]:
            return value
        if isinstance(value, torch.Tensor) and value.numel() == holding[name].elements:
            return layout.like(parameters[name], value.reshape(-1))  # a divided one may lie on one rank altogether
        return layout.like(parameters[name], elements_in(value, holding[name]))

    for name, number in numbers.items():
        if saved[STATE].get(name):
            state[number] = {key: of_own_kind(name, value) for key, value in saved[STATE][name].items()}
    groups = [
        {key: value for key, value in group.items() if key != NAMES} | {"params": [numbers[name] for name in names]}
        for group, names in zip(saved[GROUPS], own, strict=True)
    ]
    rest = {key: value for key, value in saved.items() if key not in (GROUPS, STATE, OTHER)}
    return rest | {"param_groups": groups, "state": state}


def _extends(own: list[list[str]], wanted: list[list[str]]) -> bool:
    """Return whether the wanted groups are the own ones with some parameters moved to new groups, or dropped."""
    return len(wanted) >= len(own) and all(set(w) <= set(o) for o, w in zip(own, wanted, strict=False))


def _known(wanted: list[list[str]], parameters: Mapping[str, torch.nn.Parameter]) -> bool:
    return all(name in parameters for names in wanted for name in names)


def named_as(state: dict[str, Any], parameters: Collection[str], model: Collection[str]) -> dict[str, Any]:
    """Return a captured state with the names of this model, where only one of both was compiled by ``torch.compile``.

    Args:
        state: what ``Training.capture`` returned.
        parameters: names of this model.
        model: names in its state.
    """
    if not set(state["model"]) ^ set(model):
        return state
    own = {name.replace(COMPILED, ""): name for name in (*model, *parameters)}
    if {name.replace(COMPILED, "") for name in state["model"]} != {name.replace(COMPILED, "") for name in model}:
        return state  # another model

    def renamed(name: str) -> str:
        return own.get(name.replace(COMPILED, ""), name)

    optimizers = []
    for saved in state["optimizers"]:
        known: dict[str, Any] = {}
        if GROUPS in saved:
            known[STATE] = {renamed(name): value for name, value in saved[STATE].items()}
            known[GROUPS] = [group | {NAMES: [renamed(name) for name in group[NAMES]]} for group in saved[GROUPS]]
        optimizers.append(saved | known)
    return state | {
        "model": {renamed(name): value for name, value in state["model"].items()},
        "optimizers": optimizers,
        "trained": [renamed(name) for name in state["trained"]],
    }
