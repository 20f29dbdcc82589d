"""The one small all-gather of a step: every rank puts a slot in, every rank draws the same conclusions.

It is issued after the rank's own backward pass and waited for together with the last bucket, so it also is the vote:
a step is committed by all or by none. Values that are known only after the reduction travel one step late.

Legend: ``slots_WF`` has a row for each of W ranks and a column for each of F fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FIELDS = (
    "vote", "steps", "generation", "revision", "plan_bytes", "plan_checksum", "leaving", "weight", "loss_sum",
    "checkpoint", "mark",
    "plain_weighted", "plain_groups", "plain_total", "preconditioned_weighted", "preconditioned_groups", "preconditioned_total",
    "measure_every",
)  # fmt: skip
HEADER = len(FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Squared norms of gradients, from which the noise scale is estimated (``heterotrain_core.noise_scale.estimate``).

    Attributes:
        weighted: ``sum_j b_j |g_j|^2`` over groups, b_j in samples; NaN when unknown.
        groups: how many groups those are.
        total: ``|g|^2`` of the whole batch; NaN when unknown.
    """

    weighted: float = math.nan
    groups: int = 0
    total: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one rank says about one step.

    Attributes:
        vote: whether this rank finished its part of the step.
        steps: committed steps before this one: ranks that differ here must not add their gradients.
        generation: of the newest plan held, with
        revision: its revision,
        plan_bytes: its length and
        plan_checksum: its CRC-32.
        leaving: whether this rank's pod was told to go.
        weight: samples or tokens behind this rank's gradient.
        loss_sum: sum of the loss over them; NaN when the script told none.
        checkpoint: whether this rank proposes that all write their parts of a checkpoint after this step.
        mark: a fresh random number below 2^53; the lowest rank's would tell that checkpoint's files from all others.
        plain: one step late: of this rank's gradients.
        preconditioned: one step late: of the same, as an adaptive optimizer divides them.
        measure_every: in every how many steps this rank would measure gradients and buckets, at least 1.
        buckets_s: one step late: seconds of each bucket's transfer; NaN when unknown.
    """

    vote: bool
    steps: int
    generation: int
    revision: int
    plan_bytes: int
    plan_checksum: int
    leaving: bool
    weight: float
    loss_sum: float = math.nan
    checkpoint: bool = False
    mark: int = 0
    plain: Squares = Squares()
    preconditioned: Squares = Squares()
    measure_every: int = 1
    buckets_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What all slots together say.

    Attributes:
        committed: every rank finished its part.
        newest: (generation, revision) of the newest plan that anybody holds.
        holder: lowest rank in the group that holds it.
        plan_bytes: its length.
        all_hold: nobody needs it sent.
        leaving: ranks in the group whose pod was told to go.
        weight: total samples or tokens of the step.
        loss: weighted mean loss; ``None`` when no rank told one.
        checkpoint: whether all ranks write their parts of a checkpoint after this step.
        mark: what tells that checkpoint's files from all others.
        plain: one step late: over all ranks; ``None`` when some rank does not know. The total is the lowest rank's word,
            because devices of different kinds may differ in its last digit.
        preconditioned: the same, as an adaptive optimizer divides gradients.
        measure_every: in every how many steps all ranks measure: as seldom as the one that wants it least.
        buckets_s: minimum over ranks per bucket, one step late; a rank that arrives early sees mostly waiting.
    """

    committed: bool
    newest: tuple[int, int]
    holder: int
    plan_bytes: int
    all_hold: bool
    leaving: tuple[int, ...]
    weight: float
    loss: float | None
    checkpoint: bool = False
    mark: int = 0
    plain: Squares | None
    preconditioned: Squares | None
    measure_every: int = 1
    buckets_s: tuple[float, ...]


def to_row(slot: Slot) -> list[float]:
    """Return the slot as a row of float64; every integer in it is below 2^53."""
    return [
        float(slot.vote), float(slot.steps), float(slot.generation), float(slot.revision), float(slot.plan_bytes),
        float(slot.plan_checksum), float(slot.leaving), slot.weight, slot.loss_sum,
        float(slot.checkpoint), float(slot.mark),
        slot.plain.weighted, float(slot.plain.groups), slot.plain.total,
        slot.preconditioned.weighted, float(slot.preconditioned.groups), slot.preconditioned.total, float(slot.measure_every), *slot.buckets_s,
    ]  # fmt: skip


def decide(slots_WF: Sequence[Sequence[float]]) -> StepDecision:  # noqa: N803  # shape in the name
    """Reduce the slots, the same way on every rank."""
    columns = list(zip(*slots_WF, strict=True))
    (
        votes, steps, generations, revisions, sizes_bytes, checksums, leaving, weights, loss_sums, checkpoints, marks,
        plain_weighted, plain_groups, plain_total, preconditioned_weighted, preconditioned_groups, preconditioned_total, measure_every,
    ) = columns[:HEADER]  # fmt: skip
    versions = list(zip(generations, revisions, strict=True))
    newest = max(versions)
    holder = versions.index(newest)
    weight = math.fsum(weights)
    losses = [loss for loss, counted in zip(loss_sums, weights, strict=True) if counted > 0]
    known = bool(losses) and not any(map(math.isnan, losses))
    return StepDecision(
        committed=min(votes) == 1.0 and len(set(steps)) == 1,
        newest=(int(newest[0]), int(newest[1])),
        holder=holder,
        plan_bytes=int(sizes_bytes[holder]),
        all_hold=len(set(versions)) == 1 and len(set(checksums)) == 1,
        leaving=tuple([rank for rank, leaves in enumerate(leaving) if leaves == 1.0]) if 1.0 in leaving else (),
        weight=weight,
        loss=math.fsum(losses) / weight if known and weight > 0 else None,
        checkpoint=1.0 in checkpoints,
        mark=int(marks[0]),
        plain=_squares(plain_weighted, plain_groups, plain_total),
        preconditioned=_squares(preconditioned_weighted, preconditioned_groups, preconditioned_total),
        measure_every=int(max(measure_every)),
        buckets_s=_minima(columns[HEADER:]),
    )


def _squares(weighted: Sequence[float], groups: Sequence[float], totals: Sequence[float]) -> Squares | None:
    if not math.isfinite(totals[0]) or not all(map(math.isfinite, (*weighted, *totals))):
        return None
    return Squares(weighted=math.fsum(weighted), groups=int(sum(groups)), total=totals[0])


def _minima(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    if any(math.isnan(sum(column)) for column in columns):  # a sum is NaN where one of its terms is
        return ()
    return tuple(map(min, columns))
