"""Each member's variation as the split takes it: drawn towards that of all members as far as chance explains it.

A deviation from few steps is uncertain: 10 steps give it to 24 %. Shares that followed each estimate would move with
every scrape, and would lose where the members are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterotrain_planner.perf.model import MemberModel

EXCESS = 2.0
"""Variance of the logarithm of a measured deviation, relative to that of normal steps: real ones have longer tails."""
_SURE_DEVIATIONS = 2.33
"""A spread of the estimates counts where chance alone exceeds it in 1 % of cases."""


def shrunk_variations(models: Sequence[MemberModel]) -> tuple[float, ...]:
    """Return relative standard deviations of own compute seconds, by rank.

    With n steps, the logarithm of an estimated deviation has the variance ``s_i^2 = EXCESS / (2 n)``. What the spread
    of the logarithms has beyond a chance spread is the variance ``T^2`` of the true ones, and each estimate keeps the
    part ``T^2 / (T^2 + s_i^2)`` of its distance to the mean (empirical Bayes; James and Stein 1961). Without any spread
    beyond chance, all members get the mean.

    Args:
        models: by rank. Members without steps or variation keep theirs if no other member has any, else they get the
            mean.
    """
    known = [rank for rank, model in enumerate(models) if model.steps > 0 and model.variation > 0]
    if not known:
        return tuple(model.variation for model in models)
    chance = {rank: EXCESS / (2 * models[rank].steps) for rank in known}
    logs = {rank: math.log(models[rank].variation) for rank in known}
    weight = sum(1 / chance[rank] for rank in known)
    mean = sum(logs[rank] / chance[rank] for rank in known) / weight
    true = 0.0
    if len(known) > 1:
        freedom = len(known) - 1
        # Over its freedom, a chi-squared variable: the quantile by Wilson and Hilferty (1931).
        spread = sum((logs[rank] - mean) ** 2 / chance[rank] for rank in known) / freedom
        part = 2 / (9 * freedom)
        usual = (1 - part + _SURE_DEVIATIONS * math.sqrt(part)) ** 3
        true = max(0.0, spread - usual) * len(known) / weight
    return tuple(
        math.exp(mean + (logs[rank] - mean) * true / (true + chance[rank])) if rank in chance else math.exp(mean)
        for rank in range(len(models))
    )
