"""``job.evaluate``: means over a data set that all ranks compute together, whatever the model's layout is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from heterotrain.errors import UsageError
from heterotrain.layouts.batch_parts import inputs_and_targets, run
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.state.admission import plain_numbers

MOST_BYTES = 65_536
"""Limit for the sums of one rank, in JSON."""

Measure = Callable[[Any, Any], Mapping[str, Any]]
"""``measure(output, targets)``: means over the samples of a batch, by name; numbers, or tensors with one element."""


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def measured(model: Callable[..., Any], batch: Any, measure: Measure) -> tuple[int, dict[str, float]]:
    """Return the number of samples of a batch, and what was measured of the model's output.

    Raises:
        UsageError: the batch is not a pair, or ``measure`` returned no numbers.
    """
    inputs, targets = inputs_and_targets(batch)
    output, rows = run(model, inputs), rows_of(batch)
    return rows, plain_numbers("job.evaluate", measure(output, targets)) if rows else {}


def sums(found: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return sums over samples, and their number under an empty name."""
    found = list(found)
    total: dict[str, float] = {"": float(sum(rows for rows, _ in found))}
    for name in {name: None for _, values in found for name in values}:
        total[name] = math.fsum(rows * values[name] for rows, values in found if name in values)
    return total


def means(group: Group | None, own: Mapping[str, float]) -> dict[str, float]:
    """Return the means over all ranks' samples, the same on every rank.

    Args:
        group: the formation's connections; ``None`` for a process that is alone.
        own: the result of ``sums`` on this rank.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: there was not a single sample, or a rank has too many values.
    """
    every = [dict(own)]
    if group is not None:
        text = json.dumps(own).encode()
        longest = int(max(row[0] for row in group.gather_now([float(len(text))], Purpose.SUM)))
        if longest > MOST_BYTES:
            raise UsageError(f"job.evaluate: measure returned {longest} bytes of values, at most {MOST_BYTES} fit")
        gathering = group.gather(text.ljust(longest))
        group.wait(gathering, "job.evaluate")
        every = [json.loads(row) for row in gathering.rows]
    samples = math.fsum(each[""] for each in every)
    if not samples:
        raise UsageError("job.evaluate needs a data set with at least one sample")
    names = dict.fromkeys(name for each in every for name in each if name)
    return {name: math.fsum(each.get(name, 0.0) for each in every) / samples for name in names}
