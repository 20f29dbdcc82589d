"""Waits since a time that another clock gave."""

from __future__ import annotations

SKEW_S = 5.0
"""Difference of clocks that is not worth a thought: a wait may last this much longer."""


def left_s(since_s: float, limit_s: float, *, now_s: float) -> float:
    """Return the seconds that are left of a wait; 0 when it is over, or when the clocks differ by more than ``SKEW_S``.

    A time in the future is of a clock that is ahead of the operator's. How long the wait has lasted is unknown then,
    and no wait may last for as long as a clock is wrong.

    Args:
        since_s: begin of the wait, by the clock of a node or of the API server.
        limit_s: length of the wait.
        now_s: now, by the operator's clock.
    """
    left = since_s + limit_s - now_s
    return max(0.0, min(left, limit_s)) if left <= limit_s + SKEW_S else 0.0
