"""Optimizers whose parameters are replaced, when a rank takes over another part of the model.

The script's optimizer stays the same object, because schedulers and ``step.apply`` refer to it. It knows the groups of
all parameters of the whole model, and holds those of this rank's part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class MovedOptimizer:
    """One optimizer of the script.

    Attributes:
        optimizer: the script's object.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, whole: torch.nn.Module) -> None:
        """Remember the names of each group's parameters.

        Args:
            optimizer: made from the parameters of the whole model.
            whole: this model; its parameters' values do not matter.
        """
        self.optimizer = optimizer
        self._whole = whole
        self._groups = self._named(list(whole.named_parameters()), since=0)

    def move(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Hold other parameters, without state.

        Args:
            parameters: of this rank's part of the model, by their names in the whole model.
        """
        added = [*self._whole.named_parameters(), *parameters.items()]
        self._groups += self._named(added, since=len(self._groups))  # by ``add_param_group``
        for group, names in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = [parameters[name] for name in names if name in parameters]
        self.optimizer.state = defaultdict(dict)

    def _named(self, parameters: Sequence[tuple[str, Any]], *, since: int) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in parameters}
        groups = self.optimizer.param_groups[since:]
        return [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]
