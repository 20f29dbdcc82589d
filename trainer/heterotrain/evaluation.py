"""``job.evaluate``: means over a data set that all ranks compute together, whatever the model's layout is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from heterotrain.data import batches
from heterotrain.errors import UsageError
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.roster import parts_of_member
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.parts.batches import inputs_and_targets, run
from heterotrain.parts.interface import Method, OwnSchedule
from heterotrain.state import admission

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
    return rows, admission.plain_numbers("job.evaluate", measure(output, targets)) if rows else {}


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


def part_of(
    active_group: ActiveGroup | None, dataset: batches.MapDataset, *, batch_samples: int,
    collate: batches.Collate | None, device: torch.device,
) -> Iterator[Any]:  # fmt: skip
    """Return batches of this rank's part of a data set, in proportion to its share; see ``job.part``.

    Raises:
        UsageError: this is not a data set with a length and indices, or ``batch_samples`` is below 1.
    """
    admission.whole_number("batch_samples", batch_samples, least=1)
    _check_indexed(dataset)
    parts: tuple[tuple[int, int], ...] = ((0, len(dataset)),)
    if active_group is not None:
        parts = parts_of_member(active_group.roster, active_group.rank, len(dataset))
    for ids in batches.batches_of(parts, batch_samples):
        batch = batches.fetch(dataset, ids or range(1), collate)  # an empty one needs a sample for its shape
        yield batches.to_device(batch if ids else batches.emptied(batch), device)


def evaluated_by_part(
    schedule: OwnSchedule, active_group: ActiveGroup, dataset: batches.MapDataset, measure: Measure, *,
    batch_samples: int, collate: batches.Collate | None, device: torch.device, method: Method,
) -> dict[str, float]:  # fmt: skip
    """Return means over a data set of a part that runs its passes by itself; see ``job.evaluate``.

    Raises:
        UsageError: as ``part_of``, or ``measure`` returned no numbers.
        PeerLost: the group broke meanwhile.
    """
    admission.whole_number("batch_samples", batch_samples, least=1)
    _check_indexed(dataset)
    own = parts_of_member(active_group.roster, active_group.rank, len(dataset))
    ids = list(batches.batches_of(own, batch_samples))
    values = schedule.evaluate(
        lambda index: batches.to_device(batches.fetch(dataset, ids[index], collate), device), len(ids),
        lambda output, targets: admission.plain_numbers("job.evaluate", measure(output, targets)), method=method,
    )  # fmt: skip
    return means(active_group.group, sums((len(rows), each) for rows, each in zip(ids, values, strict=False)))


def _check_indexed(dataset: object) -> None:
    """Check that a data set for an evaluation can be divided.

    Raises:
        UsageError: it has no length or no indices.
    """
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise UsageError(
            "an evaluation divides a data set, not a DataLoader: pass loader.dataset, with batch_samples= and collate="
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"an evaluation divides a data set with len() and indices, a {type(dataset).__name__} has none: put its "
            "samples into a list, or let the leader measure on all of them and job.sum the result"
        )
