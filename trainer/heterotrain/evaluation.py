"""``job.evaluate``: means over a data set that all ranks compute together, whatever the model's layout is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from heterotrain.checkpoints.same_data import ADVICE
from heterotrain.data import batches
from heterotrain.data.slices import EpochSlice
from heterotrain.errors import UsageError
from heterotrain.evaluated_data import EvaluatedData
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.roster import parts_of_member
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.network.texts import gather_texts
from heterotrain.parts.batches import inputs_and_targets, run
from heterotrain.parts.interface import Method, OwnSchedule
from heterotrain.state import admission
from heterotrain.steps.data_agreement import DataAgreement

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
        texts = gather_texts(group, json.dumps(own).encode(), "job.evaluate", purpose=Purpose.SUM)
        if len(texts[0]) > MOST_BYTES:
            raise UsageError(
                f"job.evaluate: measure returned {len(texts[0])} bytes of values, at most {MOST_BYTES} fit"
            )
        every = [json.loads(text) for text in texts]
    samples = math.fsum(each[""] for each in every)
    if not samples:
        raise UsageError("job.evaluate needs a data set with at least one sample")
    names = dict.fromkeys(name for each in every for name in each if name)
    return {name: math.fsum(each.get(name, 0.0) for each in every) / samples for name in names}


def agree_on_stream(
    group: Group | None, data: EvaluatedData, *, seed: int, fail: Callable[[Exception], NoReturn]
) -> None:
    """Check that a stream begins with the same sample on all ranks; ``fail`` raises an error that all have found.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: it does not.
    """
    if group is not None and data.is_stream:
        DataAgreement(data.source, seed=seed, purpose=Purpose.SUM).check(group, fail)


def check_read(group: Group | None, data: EvaluatedData) -> None:
    """Check that all ranks have read as many samples of a stream.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: they have not.
    """
    own = data.source.samples
    if group is None or not data.is_stream or own is None:
        return
    read = [int(row[0]) for row in group.gather_now([float(own)], Purpose.SUM)]
    for rank, samples in enumerate(read):
        if samples != read[0]:
            raise UsageError(
                f"an evaluation reads the whole stream on every rank, and rank {rank} has read {samples} samples, "
                f"rank 0 {read[0]}. {ADVICE}"
            )


def part_of(active_group: ActiveGroup | None, data: EvaluatedData, *, device: torch.device) -> Iterator[Any]:
    """Yield batches of this rank's part of a data set, in proportion to its share; see ``job.part``.

    Raises:
        UsageError: the data set cannot be read.
    """
    block, divide = data.batch_samples, _whole
    if active_group is not None:
        roster, rank = active_group.roster, active_group.rank
        block = -(-data.batch_samples * sum(roster.shares) // max(roster.shares))

        def divide(samples: int) -> tuple[tuple[int, int], ...]:
            return parts_of_member(roster, rank, samples)

    for part, is_empty in data.slices(divide, block_samples=block):
        batch = data.source.load(part)
        yield batches.to_device(batches.emptied(batch) if is_empty else batch, device)


def evaluated_by_part(
    schedule: OwnSchedule, active_group: ActiveGroup, data: EvaluatedData, measure: Measure, *,
    device: torch.device, method: Method,
) -> dict[str, float]:  # fmt: skip
    """Return means over a data set of a part that runs its passes by itself; see ``job.evaluate``.

    Raises:
        UsageError: the data set has no length, or ``measure`` returned no numbers.
        PeerLost: the group broke meanwhile.
    """
    own = parts_of_member(active_group.roster, active_group.rank, data.samples())
    ids = list(batches.batches_of(own, data.batch_samples))
    values = schedule.evaluate(
        lambda index: batches.to_device(data.source.load(EpochSlice(0, ids[index].start, ids[index].stop)), device),
        len(ids),
        lambda output, targets: admission.plain_numbers("job.evaluate", measure(output, targets)), method=method,
    )  # fmt: skip
    return means(active_group.group, sums((len(rows), each) for rows, each in zip(ids, values, strict=False)))


def _whole(samples: int) -> tuple[tuple[int, int], ...]:
    return ((0, samples),)
