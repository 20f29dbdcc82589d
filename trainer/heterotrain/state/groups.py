"""Parameter groups of optimizers by the parameters' names, so that ranks with other groups can take over a state.

A script may add groups while it trains: for layers that it thaws, or for a new head. A rank that joins or resumes
starts from the script's beginning, without these groups. The state names the parameters of each group, and the rank
makes the same groups before it restores the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

_log = logging.getLogger(__name__)

NAMES = "names"


def capture(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the optimizer's state with the names of each group's parameters.

    Parameters that are no longer in the model are left out: they get no gradient, and no other rank has them.

    Args:
        optimizer: the optimizer.
        names: the model's parameters' names by ``id``.
    """
    saved: dict[str, Any] = dict(optimizer.state_dict())
    groups = saved.get("param_groups")
    named = names_of(optimizer, names)
    if not isinstance(groups, list) or [len(g["params"]) for g in groups] != [len(n) for n in named]:
        return saved  # an optimizer with a form of its own
    kept = [
        place
        for group, own in zip(groups, named, strict=True)
        for place, name in zip(group["params"], own, strict=True)
        if name
    ]
    number_of = {place: number for number, place in enumerate(kept)}
    saved["param_groups"] = [g | {"params": [number_of[p] for p in g["params"] if p in number_of]} for g in groups]
    saved["state"] = {number_of[p]: state for p, state in saved["state"].items() if p in number_of}
    return saved | {NAMES: [[name for name in group if name] for group in named]}


def names_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters; empty text for one that is not in the model."""
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def restore(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Restore a captured state, after making the groups that it has.

    Raises:
        ValueError: the state does not belong to this optimizer.
    """
    state = dict(saved)
    wanted = state.pop(NAMES, None)
    parameters = dict(model.named_parameters())
    own = names_of(optimizer, {id(parameter): name for name, parameter in parameters.items()})
    if wanted is not None and wanted != own and _extends(own, wanted) and _known(wanted, parameters):
        for group, names in zip(optimizer.param_groups, wanted, strict=False):
            group["params"] = [parameters[name] for name in names]
        for names in wanted[len(own) :]:
            optimizer.add_param_group({"params": [parameters[name] for name in names]})
        _log.info("%s has the parameter groups of the state to continue from", type(optimizer).__name__)
    optimizer.load_state_dict(state)


def _extends(own: list[list[str]], wanted: list[list[str]]) -> bool:
    """Return whether the wanted groups are the own ones with some parameters moved to new groups, or dropped."""
    return len(wanted) >= len(own) and all(set(w) <= set(o) for o, w in zip(own, wanted, strict=False))


def _known(wanted: list[list[str]], parameters: Mapping[str, torch.nn.Parameter]) -> bool:
    return all(name in parameters for names in wanted for name in names)
