"""How long a set of workers lasts, learned from the losses that were seen."""

from __future__ import annotations

from heterotrain_core.allocate.problem import Pool

SPOT_LOSSES_PER_S = 1.0 / (24 * 3600.0)
"""Assumed before anything was seen: a spot worker lasts a day (public traces: 9 hours to several days)."""
ON_DEMAND_LOSSES_PER_S = 1.0 / (90 * 24 * 3600.0)
"""An on-demand worker is lost once a quarter: node failures and upgrades."""
ASSUMED_LOSSES = 0.5
"""How many losses the assumption weighs as much as."""


def losses_per_s(pool: Pool) -> float:
    """Return the expected losses per worker-second: what was seen, shrunk towards an assumption (gamma prior)."""
    assumed = SPOT_LOSSES_PER_S if pool.spot else ON_DEMAND_LOSSES_PER_S
    return (max(0, pool.losses) + ASSUMED_LOSSES) / (max(0.0, pool.watched_s) + ASSUMED_LOSSES / assumed)
