"""The persisted part of a grant: exhausted pools, kept in the job's status for a new operator."""

from __future__ import annotations

from heterotrain_operator.api.conditions import ConditionType, find_condition
from heterotrain_operator.api.internal_status import InternalPool
from heterotrain_operator.api.status import MAX_MESSAGE_LENGTH, HeteroTrainJobStatus
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.grants.grant import Exhausted, JobGrant, reason_in


def with_exhaustion(pool: InternalPool, grant: JobGrant) -> InternalPool:
    """Return a pool with the time since when it is exhausted, if it is, and how many times in a row it was."""
    found, tries = grant.exhausted.get(pool.name), grant.tries.get(pool.name, 0)
    if found is None:
        return pool.model_copy(update={"exhausted_tries": tries})
    why = found.why[:MAX_MESSAGE_LENGTH]
    since = rfc3339(found.since_s)
    return pool.model_copy(update={"exhausted_since": since, "exhausted_tries": tries, "exhausted_why": why})


def persisted_grant(status: HeteroTrainJobStatus) -> JobGrant:
    """Return the persisted part of a job's grant; the grant itself is still undecided."""
    limited = find_condition(status.conditions, ConditionType.WORKERS_LIMITED)
    pools = status.internal.pools
    placed = {pool.name: pool.placed for pool in status.pools}
    return JobGrant(
        undecided=True,
        reason=reason_in(limited.message) if limited is not None else "",
        exhausted={
            pool.name: Exhausted(seconds(pool.exhausted_since), placed.get(pool.name, 0), why=pool.exhausted_why)
            for pool in pools
            if pool.exhausted_since is not None
        },
        tries={pool.name: pool.exhausted_tries for pool in pools if pool.exhausted_tries},
    )
