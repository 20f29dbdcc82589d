"""The one small all-gather of a step: every rank contributes a slot and derives the same decision from all slots.

It is started after the rank's own backward pass and waited for together with the last bucket. So it is also the vote:
a step is committed by all ranks or by none. Values that are known only after the reduction are sent one step late.

Legend: ``slots_WF`` has a row for each of W ranks and a column for each of F fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

FIELDS = (
    "vote", "steps", "generation", "revision", "plan_bytes", "plan_checksum", "leaving", "weight", "loss_sum",
    "checkpoint", "mark",
    "plain_weighted", "plain_groups", "plain_total",
    "preconditioned_weighted", "preconditioned_groups", "preconditioned_total",
    "measure_every", "fingerprint", "signature", "more", "changed", "summed", "ends", "samples",
)  # fmt: skip
HEADER = len(FIELDS)
VOTE, STEPS, SIGNATURE, CHANGED, SAMPLES = map(FIELDS.index, ("vote", "steps", "signature", "changed", "samples"))
LAST = 0.5
"""Is added to the samples of an epoch's last step."""
WAITS = 0.5
"""Stands in place of 1 for a rank that has to leave, but still waits."""
AFTER, BEFORE = 1.0, 2.0
"""A rank whose script has ended the training: after this step, or before it, so that nobody may commit it."""
WORD_BITS = 52
"""Bits of a set that one float64 carries exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Squared norms of one rank's gradients, from which the noise scale is estimated (``heterotrain_core``).

    Attributes:
        weighted: ``sum_j b_j |g_j|^2`` over groups, b_j in samples; NaN when unknown.
        groups: number of groups.
        total: ``|g|^2`` of the whole batch; NaN when unknown.
    """

    weighted: float = math.nan
    groups: int = 0
    total: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The contribution of one rank to the all-gather of one step.

    Attributes:
        vote: whether this rank finished its part of the step.
        steps: committed steps before this one: ranks that differ here must not add their gradients.
        generation: generation of the newest plan that this rank holds.
        revision: revision of that plan.
        plan_bytes: length of that plan.
        plan_checksum: CRC-32 of that plan.
        leaving: whether this rank's pod leaves after this step.
        waiting: whether this rank's pod has to leave, but waits for a plan without it.
        weight: samples or tokens behind this rank's gradient.
        loss_sum: sum of the loss over them.
        checkpoint: whether this rank proposes that all write their parts of a checkpoint after this step.
        mark: a new random number below 2^53. The lowest rank's mark names the files of that checkpoint.
        plain: squared norms of this rank's gradients, one step late.
        preconditioned: the same norms as scaled by an adaptive optimizer, one step late.
        measure_every: this rank would measure gradients and buckets every this many steps, at least 1.
        fingerprint: of a slice of this rank's state, as after the step before; NaN when none was taken.
        signature: checksum of the parameters in the buckets.
        more: whether this rank makes another pass over its micro-batches in this step.
        changed: whether a tensor has changed in forward that no rank has tracked before, or got another shape.
        ends: ``AFTER`` or ``BEFORE`` where this rank's script has ended the training, else 0.
        samples: of the step over all ranks, as this rank has read its data; with ``LAST`` in an epoch's last step.
        summed: what this rank knows of a loss that is a sum over samples (``steps/summed_loss.py``); 0 for nothing.
        buckets_s: seconds of each bucket's transfer, one step late; NaN when unknown.
        unused: parameters that got no gradient on this rank: bit i stands for the i-th in the buckets.
        parameters: number of parameters in the buckets, so that every rank's slot has the same length.
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
    fingerprint: float = math.nan
    signature: int = 0
    more: bool = False
    changed: bool = False
    summed: float = 0.0
    ends: float = 0.0
    samples: float = 0.0
    buckets_s: tuple[float, ...] = ()
    unused: int = 0
    parameters: int = 0
    waiting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """The decision that follows from all slots of a step.

    Attributes:
        committed: every rank finished its part, and no script had ended the training before.
        ends: ``BEFORE`` or ``AFTER`` where the script of some rank has ended the training, else 0.
        newest: (generation, revision) of the newest plan that any rank holds.
        holder: lowest rank in the group that holds that plan.
        plan_bytes: length of that plan.
        all_hold: every rank holds that plan, so it need not be sent.
        leaving: ranks in the group whose pods leave after this step. Once one of them does, or all have to, none waits.
        waiting: ranks in the group whose pods have to leave, but wait for a plan without them.
        weight: total samples or tokens of the step.
        weights: the same of each rank in the group.
        loss: weighted mean loss; ``None`` when no rank has samples, or when it is not finite.
        non_finite: ranks in the group with a loss that is not finite.
        checkpoint: whether all ranks write their parts of a checkpoint after this step.
        mark: random number that names the files of that checkpoint.
        plain: squared norms of each rank in the group, one step late; empty when a rank does not know its own. The
            total to use is that of the lowest rank, because devices of different kinds may differ in its last digit.
        preconditioned: the same norms as scaled by an adaptive optimizer.
        measure_every: all ranks measure every this many steps: the largest number among the slots.
        fingerprints: of each rank's state, by rank in the group.
        same_pass: whether all ranks make another pass in this step, or none does.
        summed: of each rank; empty if no rank knows of such a loss.
        buckets_s: minimum over ranks per bucket, one step late; a rank that arrives early measures mostly its wait.
        unused: parameters that got no gradient on any rank, as bits like the slot's.
    """

    committed: bool
    newest: tuple[int, int]
    holder: int
    plan_bytes: int
    all_hold: bool
    leaving: tuple[int, ...]
    weight: float
    weights: tuple[float, ...]
    loss: float | None
    non_finite: tuple[int, ...] = ()
    checkpoint: bool = False
    mark: int = 0
    plain: tuple[Squares, ...]
    preconditioned: tuple[Squares, ...]
    measure_every: int = 1
    fingerprints: tuple[float, ...] = ()
    same_pass: bool = True
    summed: tuple[float, ...] = ()
    buckets_s: tuple[float, ...]
    unused: int = 0
    waiting: tuple[int, ...] = ()
    ends: float = 0.0


def to_row(slot: Slot) -> list[float]:
    """Return the slot as a row of float64; every integer in it is below 2^53."""
    return [
        float(slot.vote), float(slot.steps), float(slot.generation), float(slot.revision), float(slot.plan_bytes),
        float(slot.plan_checksum), 1.0 if slot.leaving else WAITS * slot.waiting, slot.weight, slot.loss_sum,
        float(slot.checkpoint), float(slot.mark),
        slot.plain.weighted, float(slot.plain.groups), slot.plain.total,
        slot.preconditioned.weighted, float(slot.preconditioned.groups), slot.preconditioned.total,
        float(slot.measure_every), slot.fingerprint, float(slot.signature), float(slot.more), float(slot.changed),
        slot.summed, slot.ends, slot.samples,
        *_words(slot.unused, slot.parameters), *slot.buckets_s,
    ]  # fmt: skip


def decide(slots_WF: Sequence[Sequence[float]], *, parameters: int = 0) -> StepDecision:  # noqa: N803  # shape in the name
    """Reduce the slots to one decision, which is the same on every rank.

    Args:
        slots_WF: the slots, by rank.
        parameters: number of parameters in the buckets, the same in all slots.
    """
    columns = list(zip(*slots_WF, strict=True))
    (
        votes, steps, generations, revisions, sizes_bytes, checksums, leaving, weights, loss_sums, checkpoints, marks,
        plain_weighted, plain_groups, plain_total,
        preconditioned_weighted, preconditioned_groups, preconditioned_total, measure_every, fingerprints, _, more, _,
        summed, ends, _,
    ) = columns[:HEADER]  # fmt: skip
    words = word_count(parameters)
    versions = list(zip(generations, revisions, strict=True))
    newest = max(versions)
    holder = versions.index(newest)
    weight = math.fsum(weights)
    loss, non_finite = _mean_loss(loss_sums, weights, weight)
    gone, waiting = _departures(leaving) if any(leaving) else ((), ())
    return StepDecision(
        committed=min(votes) == 1.0 and len(set(steps)) == 1 and BEFORE not in ends,
        newest=(int(newest[0]), int(newest[1])),
        holder=holder,
        plan_bytes=int(sizes_bytes[holder]),
        all_hold=len(set(versions)) == 1 and len(set(checksums)) == 1,
        leaving=gone,
        weight=weight,
        weights=tuple(weights),
        loss=loss,
        non_finite=non_finite,
        checkpoint=1.0 in checkpoints,
        mark=int(marks[0]),
        plain=() if math.isnan(plain_total[0]) else _squares(plain_weighted, plain_groups, plain_total),
        preconditioned=()
        if math.isnan(preconditioned_total[0])
        else _squares(preconditioned_weighted, preconditioned_groups, preconditioned_total),
        measure_every=int(max(measure_every)),
        fingerprints=fingerprints,
        same_pass=len(set(more)) == 1,
        summed=summed if any(summed) else (),
        buckets_s=_minima(columns[HEADER + words :]) if not math.isnan(sum(slots_WF[0][HEADER + words :])) else (),
        unused=_common(columns[HEADER : HEADER + words]) if any(slots_WF[0][HEADER : HEADER + words]) else 0,
        waiting=waiting,
        ends=max(ends),
    )


def _departures(leaving: Sequence[float]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that leave after this step, and those that wait for a plan without them."""
    asked = tuple([rank for rank, leaves in enumerate(leaving) if leaves > 0.0])
    return (asked, ()) if 1.0 in leaving or len(asked) == len(leaving) else ((), asked)


def _mean_loss(
    loss_sums: Sequence[float], weights: Sequence[float], weight: float
) -> tuple[float | None, tuple[int, ...]]:
    """Return the weighted mean loss, and the ranks whose loss is not finite; a rank without weight has none."""
    if min(weights) > 0.0 and math.isfinite(sum(loss_sums)):  # so each of them is
        return math.fsum(loss_sums) / weight, ()
    counted = [rank for rank, own in enumerate(weights) if own > 0]
    non_finite = tuple([rank for rank in counted if not math.isfinite(loss_sums[rank])])
    if not counted or non_finite:
        return None, non_finite
    try:
        return math.fsum([loss_sums[rank] for rank in counted]) / weight, ()
    except OverflowError:  # finite losses whose sum is too large for float64
        return None, tuple(counted)


def _squares(weighted: Sequence[float], groups: Sequence[float], totals: Sequence[float]) -> tuple[Squares, ...]:
    if not math.isfinite(totals[0]) or not all(map(math.isfinite, (*weighted, *totals))):
        return ()
    return tuple([
        Squares(weighted=own, groups=int(number), total=total)
        for own, number, total in zip(weighted, groups, totals, strict=True)
    ])  # fmt: skip


def word_count(bits: int) -> int:
    """Return how many numbers carry a set of this many bits."""
    return -(-bits // WORD_BITS)


def _words(members: int, bits: int) -> list[float]:
    if not members:
        return [0.0] * word_count(bits)
    mask = (1 << WORD_BITS) - 1
    return [float(members >> first & mask) for first in range(0, bits, WORD_BITS)]


def _common(columns: Sequence[Sequence[float]]) -> int:
    """Return the bits that are set in every rank's words."""
    found = 0
    for number, column in enumerate(columns):
        if min(column) > 0.0:
            found |= reduce(and_, map(int, column)) << (number * WORD_BITS)
    return found


def _minima(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    if any(math.isnan(sum(column)) for column in columns):  # a sum is NaN where one of its terms is
        return ()
    return tuple(map(min, columns))
