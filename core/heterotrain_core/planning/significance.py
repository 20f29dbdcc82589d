"""How much of a predicted gain could be mere chance: the errors of the fits, chosen by an optimum for their size.

Other shares look better than the current ones even where they are not: each member's line is off by chance, and the
optimum takes samples from whoever looks slow. Say that the current shares are the best ones, so that all members end
together at T. Member i's line is off by a normal error of deviation e_i there; the slowest seems to end at
``T + max_i e_i``, the optimum, which levels all of them, at about T. So chance alone promises a gain of ``max_i e_i / T``,
and with probability ``1 - FALSE_CHANGES`` no more than that maximum's quantile. A gain beyond it is believed.
Members that do not hold up the step make the quantile larger than it need be, never smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from heterotrain_core.perf.expected_maximum import quantile_of_maximum
from heterotrain_core.perf.model import MemberModel
from heterotrain_core.split.balance import Split

FALSE_CHANGES = 0.05
"""Part of decisions over shares that are already the best ones in which chance alone promises more."""
USUAL_VARIATION = 0.1
"""Of a step, while too few were seen to tell: how uncertain a member is then follows from how many there were."""


def false_positive_gain(models: Sequence[MemberModel], now: Split) -> float:
    """Return the part of a step that other shares seem to save by the errors of the fits alone; infinite if nothing was seen.

    A member seen at one share only has a line that rests on an assumption; where it is now it is still known from its steps.

    Args:
        models: by rank.
        now: the current shares, evaluated by these models.
    """
    errors = []
    for model, share, micro, own_s in zip(models, now.shares, now.micro_batches, now.own_s, strict=True):
        if share == 0:
            continue
        if model.error is not None:
            errors.append(micro * model.error.at(share / micro))
        elif model.steps > 0:
            errors.append(max(model.variation, USUAL_VARIATION) * own_s / math.sqrt(model.steps))
        else:
            return math.inf
    return quantile_of_maximum(errors, 1 - FALSE_CHANGES) / now.step_s if errors and now.step_s > 0 else math.inf
