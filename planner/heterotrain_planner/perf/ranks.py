"""One member's observations from those of its ranks.

The ranks of a member work on its share together, so each names the member's share and micro-batch in its counters. A
step of the member takes as long as its slowest rank in each phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from heterotrain_planner.perf.counters import MeanVariance, Observation


def observations_of_member(by_rank: Sequence[Sequence[Observation]]) -> tuple[Observation, ...]:
    """Return a member's observations: each phase is that of the rank that is slowest in it.

    The observations are those of the rank with the most steps, so that no step counts twice. Other ranks are compared
    with it where they have the same scrape, share and number of micro-batches.

    Args:
        by_rank: observations of each rank of the member, oldest first.
    """
    if not any(by_rank):
        return ()
    first = max(by_rank, key=lambda found: sum(each.steps for each in found))
    mates = [{_key(each): each for each in found} for found in by_rank if found is not first]
    return tuple(_slowest(each, [found[_key(each)] for found in mates if _key(each) in found]) for each in first)


def _key(found: Observation) -> tuple[float, int, int]:
    return (found.ended_s, found.share_samples, found.micro_batches)


def _slowest(own: Observation, mates: Sequence[Observation]) -> Observation:
    everyone = (own, *mates)

    def longest(phases: Iterable[MeanVariance | None]) -> MeanVariance | None:
        found = max((each for each in phases if each is not None), key=lambda each: each.mean, default=None)
        # Another rank was scraped at other steps, and a variance over its steps is none over a single one.
        return found if found is None or own.steps > 1 else replace(found, variance=None)

    return replace(
        own,
        warm_up=any(each.warm_up for each in everyone),
        load=longest(each.load for each in everyone),
        forward=longest(each.forward for each in everyone),
        backward=longest(each.backward for each in everyone),
        sync=longest(each.sync for each in everyone),
        update=longest(each.update for each in everyone),
        compute=longest(each.compute for each in everyone),
        step=longest(each.step for each in everyone),
    )
