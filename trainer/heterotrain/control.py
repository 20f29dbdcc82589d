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
    "checkpoint", "mark", "small_squared",
)  # fmt: skip
HEADER = len(FIELDS)


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
        small_squared: one step late: b_i |g_i|^2 for the noise scale; NaN when unknown.
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
    small_squared: float = math.nan
    buckets_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What all slots together say.

    Attributes:
        committed: every rank finished its part.
        newest: (generation, revision) of the newest plan that anybody holds.
        holder: lowest rank in the group that holds it.
        plan_bytes: its length.
        everybody_holds: nobody needs it sent.
        leaving: ranks in the group whose pod was told to go.
        weight: total samples or tokens of the step.
        loss: weighted mean loss; ``None`` when no rank told one.
        checkpoint: whether all ranks write their parts of a checkpoint after this step.
        mark: what tells that checkpoint's files from all others.
        small_squared: sum over ranks, one step late; ``None`` when some rank does not know.
        buckets_s: minimum over ranks per bucket, one step late; a rank that arrives early sees mostly waiting.
    """

    committed: bool
    newest: tuple[int, int]
    holder: int
    plan_bytes: int
    everybody_holds: bool
    leaving: tuple[int, ...]
    weight: float
    loss: float | None
    checkpoint: bool = False
    mark: int = 0
    small_squared: float | None
    buckets_s: tuple[float, ...]


def to_row(slot: Slot) -> list[float]:
    """Return the slot as a row of float64; every integer in it is below 2^53."""
    return [
        float(slot.vote), float(slot.steps), float(slot.generation), float(slot.revision), float(slot.plan_bytes),
        float(slot.plan_checksum), float(slot.leaving), slot.weight, slot.loss_sum,
        float(slot.checkpoint), float(slot.mark), slot.small_squared, *slot.buckets_s,
    ]  # fmt: skip


def verdict(slots_WF: Sequence[Sequence[float]]) -> Verdict:  # noqa: N803 - shape in the name
    """Reduce the slots, the same way on every rank."""
    rows = [dict(zip(FIELDS, row, strict=False)) for row in slots_WF]
    versions = [(int(row["generation"]), int(row["revision"])) for row in rows]
    newest = max(versions)
    holder = versions.index(newest)
    same = all(
        version == newest and row["plan_checksum"] == rows[holder]["plan_checksum"]
        for version, row in zip(versions, rows, strict=True)
    )
    weight = math.fsum(row["weight"] for row in rows)
    losses = [row["loss_sum"] for row in rows if row["weight"] > 0]
    known = bool(losses) and not any(math.isnan(loss) for loss in losses)
    small = [row["small_squared"] for row in rows]
    buckets = [row[HEADER:] for row in slots_WF]
    return Verdict(
        committed=all(row["vote"] == 1.0 and row["steps"] == rows[0]["steps"] for row in rows),
        newest=newest,
        holder=holder,
        plan_bytes=int(rows[holder]["plan_bytes"]),
        everybody_holds=same,
        leaving=tuple(rank for rank, row in enumerate(rows) if row["leaving"] == 1.0),
        weight=weight,
        loss=math.fsum(losses) / weight if known and weight > 0 else None,
        checkpoint=any(row["checkpoint"] == 1.0 for row in rows),
        mark=int(rows[0]["mark"]),
        small_squared=None if any(math.isnan(value) for value in small) else math.fsum(small),
        buckets_s=_minima(buckets),
    )


def _minima(buckets_WN: Sequence[Sequence[float]]) -> tuple[float, ...]:  # noqa: N803 - shape in the name
    if any(math.isnan(seconds) for row in buckets_WN for seconds in row):
        return ()
    return tuple(min(column) for column in zip(*buckets_WN, strict=True))
