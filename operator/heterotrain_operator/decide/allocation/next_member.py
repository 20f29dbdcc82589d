"""Which workers the next member of a limited job lacks: one clause, shown in the condition ``WorkersLimited``."""

from __future__ import annotations

from collections.abc import Mapping

from heterotrain_operator.api.text import listed
from heterotrain_operator.decide.allocation.demand import Competitor
from heterotrain_operator.decide.allocation.layout_values import LayoutValues
from heterotrain_operator.decide.grant import LACKS, JobGrant, why_limited
from heterotrain_operator.decide.objects.pods import members_per_worker, template_of

LIMITED_BY_OTHERS = frozenset({"WaitingForNodes", "NodesShared"})
"""Reasons of a grant (``why_limited``) with which more nodes would mean more workers."""
_MOST_NAMED = 3


def next_member_lacks(competitor: Competitor, grant: JobGrant, values: LayoutValues) -> str:
    """Return which workers would allow one more member than the granted ones, by pool; empty where none would.

    Where members are planned, that is the smallest set of workers with which the granted ones can form a member more,
    and before anything was measured nothing is known. Otherwise each worker brings a member.

    Args:
        competitor: the job.
        grant: what it may have.
        values: the layouts of jobs with planned members.
    """
    spec = competitor.spec
    if grant.limits is None or why_limited(spec, grant) not in LIMITED_BY_OTHERS:
        return ""
    limits = grant.limits
    if not spec.parallelism.is_planned:
        pools = [pool.name for pool in spec.worker_pools if limits[pool.name] < pool.max_replicas]
        return f"{LACKS}a worker of {listed(pools, most=_MOST_NAMED, separator=' or ')}" if pools else ""
    ranks = {pool.name: members_per_worker(spec, pool, template_of(competitor.job, pool)) for pool in spec.worker_pools}
    found = values.lacking(competitor, {name: limits[name] * number for name, number in ranks.items()})
    ways = list(dict.fromkeys(_workers(devices, ranks) for devices in found))
    return f"{LACKS}{listed(ways, most=_MOST_NAMED, separator=', or ')}" if ways else ""


def _workers(devices: Mapping[str, int], ranks: Mapping[str, int]) -> str:
    """Return the workers that have at least these devices."""
    counts = {pool: -(-number // ranks[pool]) for pool, number in devices.items()}
    return " and ".join(
        f"{'a worker' if count == 1 else f'{count} workers'} of {pool}" for pool, count in counts.items()
    )
