"""When new telemetry may lead to new shares: the fits of all jobs together use a bounded part of one core.

A fit takes 0.1 ms for each observation. Among a thousand jobs, fits for each scrape would fill many cores, and training
does not need them: far from a boundary, the next scrape brings better evidence. So each fit reserves a time slot, and
slots are handed out in order of request. There are two lanes, so that jobs near their boundary do not wait for others.
"""

from __future__ import annotations

from heterotrain_operator.decide.plan.revision import BoundaryDistance

LANE_PARTS = {BoundaryDistance.NEAR: 0.3, BoundaryDistance.FAR: 0.1}
"""Parts of one core for the fits of each lane."""
UNKNOWN_S = 0.01
"""Seconds that are reserved for the first fit of a job."""


class PlanningSlots:
    """Hands out the times at which jobs may fit models."""

    def __init__(self) -> None:
        self._free_s = dict.fromkeys(BoundaryDistance, float("-inf"))

    def reserve(self, distance: BoundaryDistance, *, takes_s: float, now_s: float) -> float:
        """Return when a fit may begin: now, or at the end of the slots reserved before.

        Args:
            distance: of the job from its next boundary.
            takes_s: seconds that the fit is expected to take.
            now_s: now, on the monotonic clock.
        """
        begins_s = max(now_s, self._free_s[distance])
        self._free_s[distance] = begins_s + takes_s / LANE_PARTS[distance]
        return begins_s
