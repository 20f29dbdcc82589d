"""Buckets of a divided model: ranges of gradients that have the same owners, and are summed over them.

Each rank makes the same list of its own buckets as every other owner of them does: it depends only on the pieces, and
on the format of the parameters. Pieces are taken in the reverse of the model's order, because backward reaches the
last layers first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from heterotrain.exchange.interface import Bucket
from heterotrain.state.ranges import Holding, OwnedRange, TensorRange


@dataclass(slots=True, eq=False, kw_only=True)
class PieceBucket(Bucket):
    """A bucket of ranges with the same owners.

    Attributes:
        parts: ranges of this rank's own flat parts, each with its place in the buffer.
    """

    parts: Mapping[TensorRange, torch.Tensor]

    @property
    def names(self) -> frozenset[str]:
        """Names of its parameters."""
        return frozenset(own.name for own in self.parts)


def piece_buckets(
    pieces: Sequence[OwnedRange],
    parameters: Mapping[str, torch.Tensor],
    holding: Holding,
    *,
    rank: int,
    enough_bytes: int,
) -> list[PieceBucket]:
    """Return this rank's buckets, in the order in which they are reduced.

    A bucket ends as soon as it holds ``enough_bytes``.

    Args:
        pieces: of the whole model, in its order.
        parameters: this rank's parts of the trainable parameters by name, of any shape.
        holding: their extents.
        rank: this rank in the formation.
        enough_bytes: size at which a bucket ends.
    """
    mine = [(place, piece) for place, piece in enumerate(pieces) if rank in piece.owners and piece.name in parameters]
    runs: list[tuple[int, list[OwnedRange]]] = []
    open_runs: dict[tuple[tuple[int, ...], torch.dtype, torch.device], tuple[int, int]] = {}  # to (run, bytes)
    for place, piece in reversed(mine):
        part = parameters[piece.name]
        key = (piece.owners, part.dtype, part.device)
        number, used = open_runs.get(key, (-1, enough_bytes))
        if used >= enough_bytes:
            number, used = len(runs), 0
            runs.append((place, []))
        runs[number] = (place, [*runs[number][1], piece])
        open_runs[key] = (number, used + piece.elements * part.element_size())
    # A bucket is complete when its first parameter in the model's order has its gradient: that order of buckets is the
    # same for all owners, whatever other buckets they have.
    return [_bucket(run, parameters, holding) for _, run in sorted(runs, key=lambda run: -run[0])]


def _bucket(run: Sequence[OwnedRange], parameters: Mapping[str, torch.Tensor], holding: Holding) -> PieceBucket:
    first, parts = parameters[run[0].name], {}
    flat = torch.zeros(sum(piece.elements for piece in run), dtype=first.dtype, device=first.device)
    for piece, part in zip(run, flat.split([piece.elements for piece in run]), strict=True):
        begin = holding[piece.name].start
        parts[TensorRange(piece.name, piece.start - begin, piece.stop - begin)] = part
    return PieceBucket(owners=run[0].owners, flat=flat, parts=parts)
