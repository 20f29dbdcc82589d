"""Copies of weights and optimizer states from before a step that changes them before its end.

A step with one pass changes weights only after all ranks have agreed on it, so it needs no copies. A step with several
passes over its micro-batches changes them in between: a loss in a later pass has to undo that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch


class WeightCopies:
    """The values before the step; empty for a step that has changed nothing so far."""

    def __init__(self) -> None:
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizers: list[tuple[torch.optim.Optimizer, dict[Any, Any], list[dict[str, Any]]]] = []

    def keep_weights(self, model: torch.nn.Module) -> None:
        """Copy the trained parameters, unless there are copies already."""
        if not self._weights:
            self._weights = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]

    def keep_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Copy the states of these optimizers, unless there are copies already."""
        known = [optimizer for optimizer, _, _ in self._optimizers]
        for optimizer in optimizers:
            if not any(optimizer is other for other in known):
                groups = [{k: _copied(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
                self._optimizers.append((optimizer, {p: _copied(s) for p, s in optimizer.state.items()}, groups))

    def restore(self) -> None:
        """Write everything back, and drop the copies."""
        with torch.no_grad():
            for parameter, before in self._weights:
                parameter.copy_(before)
        for optimizer, state, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before_group in zip(optimizer.param_groups, groups, strict=True):
                for name in group.keys() - before_group.keys() - {"params"}:
                    del group[name]
                group.update(before_group)
        self.drop()

    def drop(self) -> None:
        """Forget the copies: the step is over."""
        self._weights, self._optimizers = [], []


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)
