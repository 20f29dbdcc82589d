"""Significance of a predicted gain: how large a gain the errors of the fits alone could suggest.

Other shares look better than the current ones even where they are not: each member's line has a random error, and the
optimum takes samples from members that look slow. Suppose that the current shares are the best ones, so that all
members end together at T. Member i's line has a normal error of deviation e_i there. The slowest member then seems to
end at ``T + max_i e_i``, and the optimum, which levels all members, at about T. So chance alone suggests a gain of
``max_i e_i / T``, and with probability ``1 - FALSE_CHANGES`` no more than that maximum's quantile. A larger gain is
believed. Members that do not hold up the step make the quantile larger than necessary, never smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterotrain_core.split.balance import Split

from heterotrain_planner.perf.expected_maximum import quantile_of_maximum
from heterotrain_planner.perf.model import MemberModel

FALSE_CHANGES = 0.05
"""Part of decisions about shares that are already best in which chance alone suggests a larger gain."""
USUAL_VARIATION = 0.1
"""Least relative deviation of a step where the fit has no error; the error then follows from the number of steps."""


def false_positive_gain(models: Sequence[MemberModel], now: Split) -> float:
    """Return the part of a step that other shares seem to save by fit errors alone; infinite without observations.

    A member observed at one share only has a line that rests on an assumption, but its steps show its time at that
    share.

    Args:
        models: by rank.
        now: the current shares, evaluated by these models.
    """
    errors = []
    for model, share, micro, own_s in zip(models, now.shares, now.micro_batches, now.own_s, strict=True):
        if share == 0:
            continue
        if model.curve is not None:
            errors.append(own_s * model.curve.error_at(share / micro))
        elif model.error is not None:
            errors.append(micro * model.error.at(share / micro))
        elif model.steps > 0:
            errors.append(max(model.variation, USUAL_VARIATION) * own_s / math.sqrt(model.steps))
        else:
            return math.inf
    return quantile_of_maximum(errors, 1 - FALSE_CHANGES) / now.step_s if errors and now.step_s > 0 else math.inf
