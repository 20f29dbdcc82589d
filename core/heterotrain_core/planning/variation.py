"""Each member's variation as the split takes it: its own estimate, drawn towards that of all members.

A deviation from few steps is uncertain: 10 steps give it to 24 %. Shares that followed each estimate would move with
every scrape, and would gain nothing where the members are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterotrain_core.perf.model import MemberModel

USUAL_STEPS = 20
"""Steps after which a member's own estimate weighs as much as that of all members."""


def shrunk_variations(models: Sequence[MemberModel]) -> tuple[float, ...]:
    """Return relative standard deviations of own compute seconds, by rank.

    Variances are averaged with weights: the member's own with its steps since the last change of speed, that of all
    members with ``USUAL_STEPS``. Without any observed step, a member keeps its model's variation.

    Args:
        models: by rank.
    """
    total = sum(model.steps_at_speed for model in models)
    if total == 0:
        return tuple(model.variation for model in models)
    mean = sum(model.steps_at_speed * model.variation**2 for model in models) / total
    return tuple(
        math.sqrt(
            (model.steps_at_speed * model.variation**2 + USUAL_STEPS * mean) / (model.steps_at_speed + USUAL_STEPS)
        )
        for model in models
    )
