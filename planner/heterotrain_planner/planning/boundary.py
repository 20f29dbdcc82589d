"""Steps between two boundaries where nobody has chosen them: few at first, more once the shares stay.

Shares of a first plan are even, so each step with them is lost on unequal members, and ten steps already show by how
much. Later changes are small, and each one costs a revision, a look by every worker and perhaps compiled kernels. So
the distance grows with the steps that the shares have been in force, up to some minutes. Distances are ``FIRST_STEPS``
times a power of two: a longer one never has a boundary that a shorter one has not. Ranks switch by the number of the
step alone.
"""

from __future__ import annotations

import math

FIRST_STEPS = 10
"""Steps of the first distance, of which the first three are a warm-up that fits leave out."""
LONGEST_S = 300.0
"""Seconds between two boundaries at most, unless ``FIRST_STEPS`` steps take longer."""
_LONGEST_PART = 0.5
"""Distance at most, relative to the steps that the shares have been in force."""


def steps_to_boundary(in_force_steps: float, step_s: float) -> int:
    """Return the distance between boundaries in steps.

    Args:
        in_force_steps: committed steps since the shares took effect.
        step_s: mean seconds of a step; 0 where it is unknown.
    """
    most = _LONGEST_PART * in_force_steps
    if step_s > 0:
        most = min(most, LONGEST_S / step_s)
    return FIRST_STEPS << max(0, math.floor(math.log2(max(1.0, most / FIRST_STEPS))))
