"""Divisions of a batch without a time model: even shares, and shares in a given proportion."""

from __future__ import annotations

from collections.abc import Sequence


def evenly(total_samples: int, members: int) -> tuple[int, ...]:
    """Return even shares; the remainder goes to the lowest ranks, one sample each.

    Raises:
        ValueError: fewer than one member, or a negative total.
    """
    if members < 1 or total_samples < 0:
        raise ValueError(f"cannot divide {total_samples} samples among {members} members")
    least, left = divmod(total_samples, members)
    return tuple(least + (rank < left) for rank in range(members))


def in_proportion(total_samples: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Return ``total_samples`` divided in proportion to ``shares``, in whole samples, by largest remainder.

    Integer arithmetic, ties to the lower rank: every rank computes the same result. All-zero shares are divided evenly.
    If the total is the sum of the shares, the result is the shares themselves.

    Raises:
        ValueError: no shares, a negative share or a negative total.
    """
    whole = sum(shares)
    if not shares or total_samples < 0 or min(shares) < 0:
        raise ValueError(f"cannot divide {total_samples} samples in proportion to {list(shares)}")
    if whole == 0:
        return evenly(total_samples, len(shares))
    parts = [divmod(total_samples * share, whole) for share in shares]
    left = total_samples - sum(quotient for quotient, _ in parts)
    order = sorted(range(len(shares)), key=lambda rank: (-parts[rank][1], rank))
    favoured = set(order[:left])
    return tuple(quotient + (rank in favoured) for rank, (quotient, _) in enumerate(parts))
