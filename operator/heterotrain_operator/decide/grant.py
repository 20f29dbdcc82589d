"""The grant of one job: what it may use of the nodes that other jobs want, too. Each job's pass follows its grant.

The exhausted pools are kept in the job's status, for a new operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from heterotrain_core.contract.choices import Objective

from heterotrain_operator.api.conditions import ConditionType, find_condition
from heterotrain_operator.api.internal_status import InternalPool
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.api.status import MAX_MESSAGE_LENGTH, HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.parse import rfc3339, seconds

NOTICED_S, NOTICED_EARLIER_S = 60.0, 300.0
"""A waiting job's latest start is stated again once it is so much later, or so much earlier."""
_STARTS, LACKS = "it starts at the latest ", "the next member lacks "
"""Begin of the clause about workers that other jobs' nodes would make possible."""


class Exhausted(NamedTuple):
    """Since when a pool counts as exhausted, and how many of its workers have nodes nevertheless.

    ``generation`` is that of the spec for which it was found, 0 where that is not known. ``why`` says what keeps a
    worker from starting on its node; it is empty where workers found no node.
    """

    since_s: float
    placed: int
    generation: int = 0
    why: str = ""


class LatestStart(NamedTuple):
    """By when a waiting job starts, as its status states it: so many seconds after a time."""

    within_s: float
    since_s: float

    @property
    def text(self) -> str:
        """The same in words."""
        after = f"{math.ceil(self.within_s / 60)} minutes after {rfc3339(self.since_s)}"
        return f"{_STARTS}{after}, as rates are predicted and if no higher priority comes"


def reason_in(message: str) -> str:
    """Return the reason in a grant's message, without its other clauses."""
    for clause in (LACKS, _STARTS):
        message = "" if message.startswith(clause) else message.partition(f"; {clause}")[0]
    return message


def restated(before: LatestStart | None, within_s: float | None, *, now_s: float) -> LatestStart | None:
    """Return the latest start to state: the one stated before, unless it has moved; measured rates vary a little."""
    if within_s is None or before is None:
        return None if within_s is None else LatestStart(within_s, now_s)
    later_s = now_s + within_s - (before.since_s + before.within_s)
    return before if -NOTICED_EARLIER_S <= later_s <= NOTICED_S else LatestStart(within_s, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGrant:
    """What a job may use.

    Attributes:
        limits: by pool, the number of workers to have; ``None`` without limits: no other job wants the nodes.
        leave: uids of workers that have to leave because of the limits.
        may_wait: with limits, pools in which workers beyond the limits may wait for new nodes.
        short_since_s: by pool, since when fewer workers than granted have nodes although none is about to make room.
        exhausted: by pool, that granted workers have found no node for long, although there seemed to be room.
        tries: by pool, how many times in a row it was exhausted; reset once the granted workers have nodes.
        later: by pool on a node group, workers that come (or leave, below 0) once the first worker of a pool is ready.
        undecided: whether the allocation has not decided yet: no worker comes or goes.
        reason: why, in one sentence; empty without limits.
        lacks: which workers the next member lacks, as a clause; empty where other jobs' nodes are not the obstacle.
        kept_since_s: since when nodes are kept for the job, which waits; ``None`` where none are.
        latest_start: by when it starts then; ``None`` where run times are not known.
        kept_out: whether free nodes are kept for another job, so that this one waits.
        spare_s: seconds between the expected end and the job's deadline, negative when it is late; ``None`` without a
            deadline or while the remaining work is unknown.
        in_time: whether the grant is enough for the deadline, so that the job needs no more.
    """

    limits: Mapping[str, int] | None = None
    leave: frozenset[str] = frozenset()
    may_wait: frozenset[str] = frozenset()
    short_since_s: Mapping[str, float] = field(default_factory=dict)
    exhausted: Mapping[str, Exhausted] = field(default_factory=dict)
    tries: Mapping[str, int] = field(default_factory=dict)
    later: Mapping[str, int] = field(default_factory=dict)
    undecided: bool = False
    reason: str = ""
    lacks: str = ""
    kept_since_s: float | None = None
    latest_start: LatestStart | None = None
    kept_out: bool = False
    spare_s: float | None = None
    in_time: bool = False

    def may_wait_in(self, pool: str) -> bool:
        """Return whether a worker may wait in a pool for a node: not where workers cannot start on nodes."""
        known = self.exhausted.get(pool)
        return (self.limits is None or pool in self.may_wait) and not (known is not None and known.why)

    @property
    def message(self) -> str:
        """The reason, when a waiting job starts at the latest, and what the next member lacks."""
        return "; ".join(filter(None, (self.reason, self.latest_start and self.latest_start.text, self.lacks)))

    @property
    def granted(self) -> int | None:
        """Workers over all pools; ``None`` without limits."""
        return None if self.limits is None else sum(self.limits.values())


def why_limited(spec: HeteroTrainJobSpec, grant: JobGrant) -> str:
    """Return the reason of the grant as one CamelCase word."""
    if grant.limits is None:
        return "AllocationPending" if grant.undecided else "NotLimited"
    granted = sum(grant.limits.values())
    if granted >= most_workers(spec):
        return "FullyGranted"
    if granted < spec.elastic_policy.min_replicas:
        return "WaitingForNodes"
    if grant.in_time:
        return "EnoughForDeadline"
    return "FewerWorkersCheaper" if spec.objective is Objective.COST else "NodesShared"


UNLIMITED = JobGrant()
"""No other job wants the nodes, or no allocation decides about the job."""


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
