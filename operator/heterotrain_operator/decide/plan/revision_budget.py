"""Budgets a job's revisions, because each one patches every pod of the job.

Speeds that alternate would otherwise cause a revision for each scrape. The budget allows some revisions in quick
succession, as a job's first minutes need them, and then one for each interval. Changes of membership are never delayed.
"""

from __future__ import annotations

from dataclasses import dataclass

BURST = 12
"""Revisions that may follow each other at once."""
INTERVAL_S = 10.0
"""Seconds after which one more revision is allowed, up to ``BURST``."""


@dataclass(frozen=True, slots=True)
class RevisionBudget:
    """Revisions that are left at a time, as in a token bucket.

    Attributes:
        left: revisions that may be written at ``at_s``; a fraction is on the way to the next one.
        at_s: time in seconds on the caller's clock.
    """

    left: float = float(BURST)
    at_s: float = 0.0

    def refilled(self, now_s: float) -> RevisionBudget:
        """Return the budget at a later time."""
        return RevisionBudget(min(float(BURST), self.left + max(0.0, now_s - self.at_s) / INTERVAL_S), now_s)

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a revision is allowed; 0 when one is allowed now."""
        return max(0.0, (1.0 - self.refilled(now_s).left) * INTERVAL_S)

    def spent(self, now_s: float) -> RevisionBudget:
        """Return the budget after one more revision; a change of membership may overdraw it."""
        return RevisionBudget(max(0.0, self.refilled(now_s).left - 1.0), now_s)
