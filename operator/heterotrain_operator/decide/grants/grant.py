"""What one job may have of the nodes that others want, too: the answer of the allocation, as each job's pass sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from heterotrain_core.allocate.problem import Objective
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.member import SplitMember

from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputModel:
    """How fast a job is, as far as any of its plans has told; kept here, because a plan knows only its members.

    Attributes:
        members: by pool, a rank of middle speed.
        communication: the exchange.
        communication_members: ranks that it was measured with; 0 before it was.
        variation: relative standard deviation of a rank's step.
        pace: measured samples per second over predicted ones, over the whole time of a membership.
    """

    members: Mapping[str, SplitMember] = field(default_factory=dict)
    communication: CommunicationTime = field(default_factory=CommunicationTime)
    communication_members: int = 0
    variation: float = 0.0
    pace: float = 1.0


class Exhausted(NamedTuple):
    """Since when a pool counts as out of stock, and how many workers have nodes there nevertheless."""

    since_s: float
    placed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGrant:
    """What a job may have.

    Attributes:
        limits: by pool, workers that it shall have; ``None`` when nobody else wants its nodes: whatever fits.
        leave: uids of workers that have to leave for it.
        waits: with limits, pools in which workers beyond them may wait for nodes that may come.
        short: by pool, since when fewer workers than granted have nodes although none is about to make room.
        exhausted: by pool, that workers who were granted found no node for long, although there seemed to be room.
        tries: by pool, how often in a row it was found exhausted; forgotten once what was granted is there.
        held: nothing is decided yet: no worker comes or goes.
        reason: why, in one sentence; empty without limits.
        spare_s: seconds between the expected end and the job's deadline, negative when it is late; ``None`` without a
            deadline or while the work is not known.
        in_time: whether what it may have is enough for its deadline, so that no more is wanted.
        learned: what the decision rests on, for the next one.
    """

    limits: Mapping[str, int] | None = None
    leave: frozenset[str] = frozenset()
    may_wait: frozenset[str] = frozenset()
    short_since_s: Mapping[str, float] = field(default_factory=dict)
    exhausted: Mapping[str, Exhausted] = field(default_factory=dict)
    tries: Mapping[str, int] = field(default_factory=dict)
    undecided: bool = False
    reason: str = ""
    spare_s: float | None = None
    in_time: bool = False
    throughput: ThroughputModel = field(default_factory=ThroughputModel)

    @property
    def granted(self) -> int | None:
        """Workers over all pools; ``None`` without limits."""
        return None if self.limits is None else sum(self.limits.values())


def why_limited(spec: HeteroTrainJobSpec, grant: JobGrant) -> str:
    """Return in one word why the job may have what it may have."""
    if grant.limits is None:
        return "Undecided" if grant.undecided else "Free"
    granted = sum(grant.limits.values())
    if granted >= most_workers(spec):
        return "Granted"
    if granted < spec.elastic_policy.min_replicas:
        return "WaitsForNodes"
    if grant.in_time:
        return "EnoughForDeadline"
    return "FewerAreCheaper" if spec.objective is Objective.COST else "NodesShared"


UNLIMITED = JobGrant()
"""Nobody else wants the job's nodes, or nobody decides about them."""
UNDECIDED = JobGrant(undecided=True)
"""The next allocation will tell."""
