"""The columns of the vote that belong to the step itself; other features have theirs in their own modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import NamedTuple

from heterotrain.network.control import Column, Rows, one

AFTER, BEFORE = 1.0, 2.0
"""A rank whose script has ended the training: after this step, or before it, so that nobody may commit it."""
LAST = 0.5
"""Is added to the samples of an epoch's last step."""
WORD_BITS = 52
"""Bits of a set that one float64 carries exactly."""


def words(members: int, bits: int) -> tuple[float, ...]:
    """Return a set, of which every rank sends as many bits, as numbers of a column."""
    if not members:
        return (0.0,) * -(-bits // WORD_BITS)
    mask = (1 << WORD_BITS) - 1
    return tuple([float(members >> first & mask) for first in range(0, bits, WORD_BITS)])


def _common(rows: Rows) -> int:
    """Return the bits that are set in every rank's words."""
    columns = enumerate(zip(*rows, strict=True))
    return sum(reduce(and_, map(int, column)) << number * WORD_BITS for number, column in columns)


class CheckpointVote(NamedTuple):
    """A checkpoint in parts after the step.

    Attributes:
        is_due: whether all ranks write theirs, because one proposes it.
        mark: number that names its files, and those of other checkpoints that follow from the step.
    """

    is_due: bool
    mark: int


def _unlike(values: Sequence[float]) -> tuple[float, ...]:
    return () if len(set(values)) == 1 else tuple(values)


SIGNATURE = Column("signature", one(tuple))
"""Checksums of the parameters in the buckets, by rank."""
UNUSED = Column("unused", _common)
"""Parameters that got no gradient on any rank: bit i stands for the i-th in the buckets."""
CHANGED = Column("changed", one(any))
"""Whether some rank's tensor has changed in forward that no rank has tracked before, or got another shape."""
MORE = Column("more", one(lambda values: len(set(values)) == 1))
"""Whether all ranks make another pass over their micro-batches in this step, or none does."""
SUMMED = Column("summed", one(lambda values: tuple(values) if any(values) else ()))
"""What ranks know of a loss that is no mean over samples (``summed_loss.py``); empty if no rank knows of one."""
ENDS = Column("ends", one(max))
"""``BEFORE`` or ``AFTER`` where the script of some rank has ended the training, else 0."""
SAMPLES = Column("samples", one(_unlike))
"""Samples of the step over all ranks, with ``LAST``, as each rank has read its data; empty if they are the same."""
CHECKPOINT = Column("checkpoint", lambda rows: CheckpointVote(any(row[0] for row in rows), int(rows[0][1])))
"""Whether a rank proposes a checkpoint, and a random number below 2^53, of which the lowest rank's is used."""
