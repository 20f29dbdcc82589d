"""Estimates how long workers last, from observed losses."""

from __future__ import annotations

from heterotrain_planner.allocate.problem import Pool

SPOT_LOSSES_PER_S = 1.0 / (24 * 3600.0)
"""Prior for spot workers: one loss a day (public traces: one in 9 hours to several days)."""
ON_DEMAND_LOSSES_PER_S = 1.0 / (90 * 24 * 3600.0)
"""Prior for on-demand workers: one loss a quarter, by node failures and upgrades."""
ASSUMED_LOSSES = 0.5
"""Weight of the prior, in losses: that many observed losses count as much as the prior."""


def losses_per_s(pool: Pool) -> float:
    """Return the expected losses per worker-second: the observed rate, shrunk towards a prior (gamma)."""
    prior = SPOT_LOSSES_PER_S if pool.spot else ON_DEMAND_LOSSES_PER_S
    return (max(0, pool.losses) + ASSUMED_LOSSES) / (max(0.0, pool.watched_s) + ASSUMED_LOSSES / prior)
