"""Probes: small variations of the shares within an epoch, so that speeds are known after one epoch instead of two.

Fixed shares show each member at one size only, where its slope and its fixed part cannot be separated. The gradient is
exact for any shares, so varying them costs a little time and no accuracy. Two opposite vectors take turns every few
steps: a short epoch shows both, and slow drift or a warm-up affects both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VARIATION = 0.5
"""Part of its share by which a share varies.

On random clusters, 0.5 made the first epoch 5 % longer and left 4 of 100 clusters more than 2 % from the optimum. With
0.3 these were 2 % and 10 clusters (docs/mathematics.md).
"""
LARGEST_VARIATION = 0.7
"""The same on the side with fewer members: three members vary by about +0.3, +0.3 and -0.45."""
PROBE_STEPS = 2
"""Steps for each vector of a probe."""
ROUNDS = 4
"""Turns of both variations in a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A member's least and largest share and the step between shares; ``most`` is ``None`` without a cap."""

    least: int
    most: int | None
    granularity: int


def probe_vectors(
    shares: Sequence[int], limits: Sequence[Limits], learners: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return share vectors around ``shares`` in which the ``learners`` vary, with the same sum; empty when none can.

    Each vector is for ``PROBE_STEPS`` steps: first ``shares`` itself (a process's first steps are slow, and this shape
    occurs again later), then both variations in turn.

    Args:
        shares: samples by rank.
        limits: by rank.
        learners: ranks whose speed has to be learned; the others absorb the difference.
    """
    moves = _moves(shares, limits, learners)
    up = _vector(shares, limits, moves)
    down = _vector(shares, limits, [-move for move in moves])
    pair = tuple(vector for vector in (up, down) if vector is not None and vector != tuple(shares))
    return (tuple(shares), *(pair * ROUNDS)) if pair else ()


def _moves(shares: Sequence[int], limits: Sequence[Limits], learners: Sequence[int]) -> list[float]:
    """Return the change of each share in the first variation; the sum is zero."""
    up: list[int] = []
    down: list[int] = []
    reach = {rank: max(VARIATION * shares[rank], limits[rank].granularity) for rank in learners}
    half = sum(reach.values()) / 2
    for rank in learners:
        (up if sum(reach[r] for r in up) + reach[rank] / 2 <= half else down).append(rank)
    moves = [0.0] * len(shares)
    others = [rank for rank in range(len(shares)) if rank not in reach and shares[rank] > 0]
    spare = sum(shares[rank] for rank in others)
    high, low = sum(reach[rank] for rank in up), sum(reach[rank] for rank in down)
    if not others:
        # No other member absorbs the difference: the lighter side moves more, as far as allowed, the heavier one less.
        most = LARGEST_VARIATION / VARIATION
        common = min(max(high, low), most * min(high, low))
        high, low = (common / side if side else 0.0 for side in (high, low))
    else:
        # Members of known speed absorb the difference, but stay near their shares.
        room = VARIATION * spare
        high, low = min(1.0, (low + room) / high) if high else 0.0, min(1.0, (high + room) / low) if low else 0.0
    for sign, side, factor in ((1.0, up, high), (-1.0, down, low)):
        for rank in side:
            moves[rank] = sign * reach[rank] * factor
    if others:
        net = sum(moves)
        for rank in others:
            moves[rank] = -net * shares[rank] / spare
    return moves


def _vector(shares: Sequence[int], limits: Sequence[Limits], moves: Sequence[float]) -> tuple[int, ...] | None:
    """Return whole shares near ``shares + moves`` within limits and with the same sum, or ``None``."""
    vector = []
    for share, move, limit in zip(shares, moves, limits, strict=True):
        wanted = share + round(move / limit.granularity) * limit.granularity
        most = wanted if limit.most is None else limit.most // limit.granularity * limit.granularity
        vector.append(max(min(wanted, most), -(-limit.least // limit.granularity) * limit.granularity))
    missing = sum(shares) - sum(vector)
    # Rounding and limits leave a rest. The members that move least take it, so that the variation stays visible.
    for rank in sorted(range(len(shares)), key=lambda rank: (abs(moves[rank]), rank)):
        limit = limits[rank]
        room = missing if limit.most is None or missing < 0 else min(missing, limit.most - vector[rank])
        room = max(room, limit.least - vector[rank]) if missing < 0 else room
        whole = int(room / limit.granularity) * limit.granularity
        vector[rank] += whole
        missing -= whole
    return tuple(vector) if missing == 0 and min(vector) >= 0 else None
