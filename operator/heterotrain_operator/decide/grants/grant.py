"""The grant of one job: what it may use of the nodes that other jobs want, too. Each job's pass follows its grant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from heterotrain_core.contract.choices import Objective
from heterotrain_planner.allocate.distance import Distance

from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec

STATED_FOR_S = 600.0
"""Seconds after which a smaller distance is stated: distances come and go with new measurements."""
_DISTANCE = "allocation: "
LACKS = "the next member lacks "
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


class StatedDistance(NamedTuple):
    """How far the allocation may be from the best one, as the status states it, and when it last was so far."""

    distance: Distance
    seen_s: float


def reason_in(message: str) -> str:
    """Return the reason in a grant's message, without what the next member lacks and without the distance."""
    reason = "" if message.startswith(_DISTANCE) else message.partition(f"; {_DISTANCE}")[0]
    return "" if reason.startswith(LACKS) else reason.partition(f"; {LACKS}")[0]


def restated(before: StatedDistance | None, now: Distance, *, now_s: float) -> StatedDistance:
    """Return the distance to state: a larger one at once, a smaller one once it stays smaller for ``STATED_FOR_S``.

    The statement is always true, and the status of every job of an allocation does not change with each scrape.
    """
    coarse = now.coarse
    if before is None or before.distance == coarse or not before.distance.covers(now):
        return StatedDistance(coarse, now_s)
    return before if now_s - before.seen_s < STATED_FOR_S else StatedDistance(coarse, now_s)


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
        distance: how far the allocation may be from the best one; ``None`` without limits or while undecided.
        kept_since_s: since when nodes are kept for the job, which waits; ``None`` where none are.
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
    distance: StatedDistance | None = None
    kept_since_s: float | None = None
    kept_out: bool = False
    spare_s: float | None = None
    in_time: bool = False

    def may_wait_in(self, pool: str) -> bool:
        """Return whether a worker may wait in a pool for a node: not where workers cannot start on nodes."""
        known = self.exhausted.get(pool)
        return (self.limits is None or pool in self.may_wait) and not (known is not None and known.why)

    @property
    def message(self) -> str:
        """The reason, what the next member lacks, and how far the allocation may be from the best one."""
        distance = "" if self.distance is None else f"{_DISTANCE}{self.distance.distance.text}"
        return "; ".join(filter(None, (self.reason, self.lacks, distance)))

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
