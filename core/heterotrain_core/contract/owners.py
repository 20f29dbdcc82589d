"""Counts the groups of ranks that exchange gradients among themselves when members hold the model in different parts.

The owners of an element are the ranks that hold it, one of each member, and each set of owners is a group with
connections of its own. Stages change owners at cuts between units, shards at edges inside each unit. So the groups are
the cells of a grid: the runs of units between all members' cuts, times the parts between all members' edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from heterotrain_core.contract.plan import Layout

MOST_OWNER_GROUPS = 256
"""Groups of owners of one plan; each costs its ranks connections and memory. Ranks refuse a plan that needs more."""


def owner_groups(layouts: Sequence[Layout]) -> int:
    """Return how many groups members with these layouts need, at most.

    Members of one rank each are one group of all ranks, which needs no connections of its own and does not count.
    """
    if len(layouts) < 2:  # noqa: PLR2004  # a member alone exchanges with nobody
        return 0
    cuts = {cut for layout in layouts for cut in layout.cuts}
    edges = {edge for layout in layouts for edge in _edges(layout)}
    groups = (len(cuts) + 1) * (len(edges) + 1)
    return groups if groups > 1 else 0


def _edges(layout: Layout) -> list[Fraction]:
    """Return where the parts of a unit change from one shard to the next, without the ends."""
    weights = layout.state_weights or (1,) * layout.shards
    return [Fraction(before, sum(weights)) for before in itertools.accumulate(weights[:-1])]
