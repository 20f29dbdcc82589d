"""The fastest cover among those that allow some kinds of layouts, or fewer of them."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.layout.book import Book
from heterotrain_core.layout.cover import cover
from heterotrain_core.layout.result import Cover, Infeasible, LayoutKind, Template

TIE = 1e-6
"""Relative difference of rates below which fewer kinds of layouts are better."""
_CHOICES = (
    frozenset({LayoutKind.REPLICATED}),
    frozenset({LayoutKind.REPLICATED, LayoutKind.SHARDED}),
    frozenset({LayoutKind.REPLICATED, LayoutKind.PIPELINE}),
    frozenset(LayoutKind),
)
"""A member of one device is always possible."""


def best_cover(
    book: Book,
    kinds: frozenset[LayoutKind],
    *,
    devices: Sequence[int] | None = None,
    further: Sequence[Template] = (),
) -> Cover | Infeasible:
    """Return the fastest members whose layouts are of these kinds, or why there are none.

    ``cover`` chooses templates before it knows their exchange exactly. So the kinds are compared with fewer of them,
    and fewer win a tie.

    Args:
        book: templates of the job.
        kinds: layouts that members may have; replicated ones always belong to them.
        devices: as in ``cover``.
        further: templates of sharded members, where these are allowed.
    """
    found = [
        cover(book, devices=devices, kinds=each, further=further if LayoutKind.SHARDED in each else ())
        for each in _CHOICES
        if each <= kinds
    ]
    covers = [each for each in found if isinstance(each, Cover)]
    return max(covers, key=lambda each: each.samples_per_s * (1 - TIE * found.index(each)), default=found[-1])
