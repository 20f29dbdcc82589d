"""Rules by which the values that micro-batches leave in a tensor become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from heterotrain_core.contract.choices import Choice

from heterotrain.errors import UsageError
from heterotrain.state.admission import choice

Derive = Callable[[torch.nn.Module], torch.Tensor | None]
"""Returns a tensor's value from the layer, whose other tensors are combined already; ``None`` to leave it as it is."""


class Rule(Choice):
    """How values of several micro-batches are combined; see the package's docstring."""

    MEAN = "mean"
    """Weighted by samples."""
    SUM = "sum"
    """Of what each micro-batch adds; with ``decay`` for moving sums."""
    MIN = "min"
    """Element by element."""
    MAX = "max"
    """Element by element."""
    LEADER = "leader"
    """That of the batch's first micro-batch: exact where a change does not depend on samples."""
    OWN = "own"
    """Each rank keeps its own, which is neither combined nor compared."""
    DERIVED = "derived"
    """Computed from the layer's other tensors by a function."""


@dataclass(frozen=True, slots=True)
class Combination:
    """A rule with its settings.

    Attributes:
        rule: the rule.
        decay: of ``sum``: the factor on the earlier value in each forward pass.
        derive: of ``derived``.
    """

    rule: Rule
    decay: float = 1.0
    derive: Derive | None = None


def combination(rule: Any, *, decay: float = 1.0) -> Combination:
    """Return the combination that a script asks for.

    Args:
        rule: a name, or a function that computes the value from the layer.
        decay: of ``sum``.

    Raises:
        UsageError: there is no such rule, or the decay is not within [0, 1] or belongs to another rule.
    """
    if callable(rule):
        found = Combination(Rule.DERIVED, derive=rule)
    else:
        found = Combination(choice("job.buffers: rule", rule, Rule), decay)
        if found.rule is Rule.DERIVED:
            raise UsageError(
                "job.buffers: give the function that computes the buffer from its layer in place of a name"
            )
    if not (isinstance(decay, int | float) and 0.0 <= decay <= 1.0):
        raise UsageError(f"job.buffers: decay must be a number from 0 to 1, not {decay!r}")
    if decay != 1.0 and found.rule is not Rule.SUM:
        raise UsageError("job.buffers: decay= belongs to the rule 'sum'")
    return found
