"""What an allocation is decided on: pools, jobs, and what a change costs; and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.member import SplitMember

Size = int | tuple[int, ...]
"""What a node has or a worker takes: accelerators, or amounts of several resources in one order for the whole pool."""


class Objective(StrEnum):
    """What a job wants most."""

    THROUGHPUT = "throughput"
    """Samples per second."""
    GOODPUT = "goodput"
    """Samples per second, counted at what they are worth at the best batch."""
    COST = "cost"
    """Goodput per price: as cheap a sample as possible."""
    DEADLINE = "deadline"
    """Done in time at the least price (where nobody has one, with the least workers); where that is out of reach, or the work is not known yet, samples per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A set of nodes with one kind of accelerator.

    Attributes:
        name: as in jobs' offers.
        nodes: accelerators (or amounts of several resources) on each node that jobs of this allocation may use, whoever
            of them holds these now.
        spot: whether its workers may be taken away at any time.
        growth: accelerators on each further node that the provider would start on demand.
        out_of_stock: the provider has refused lately: no further nodes for now.
        losses: workers that were lost here, as far as anybody remembers; a part where they may have been elsewhere.
        watched_s: worker-seconds over which they were lost.
    """

    name: str
    nodes: tuple[Size, ...] = ()
    spot: bool = False
    growth: tuple[Size, ...] = ()
    out_of_stock: bool = False
    losses: float = 0.0
    watched_s: float = 0.0

    @property
    def usable(self) -> tuple[Size, ...]:
        """What each node has that can be had now."""
        return self.nodes if self.out_of_stock else self.nodes + self.growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A pool as one job may use it.

    A job may know several pools under one name of its own, because only part of their nodes is open to others. Offers
    of one name follow each other, share their limits (the numbers of each have to be the same) and differ in ``pool``.

    Attributes:
        pool: the pool's name.
        name: the job's own name for it; empty for ``pool``.
        min_workers: workers that the job always has there when it runs; waived while the pool cannot give them, unless
            ``required``.
        required: whether the job does not run without its minimum there.
        max_workers: most workers.
        accelerators: that one worker takes, all on one node, in the terms of ``Pool.nodes``; 0 is counted as 1.
        ranks: members that one worker runs.
        price_per_hour: of one worker.
        member: one rank's time curve and limits; ``None`` while unknown, then all such members count alike.
    """

    pool: str
    name: str = ""
    min_workers: int = 0
    required: bool = False
    max_workers: int
    accelerators: Size = 1
    ranks: int = 1
    price_per_hour: float = 0.0
    member: SplitMember | None = None

    @property
    def size(self) -> Size:
        """What one worker takes, at least 1."""
        return self.accelerators or 1

    @property
    def key(self) -> str:
        """Names the offer within its job."""
        return f"{self.name} on {self.pool}" if self.name else self.pool

    @property
    def label(self) -> str:
        """The job's name for the pool."""
        return self.name or self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """One job's wish and state.

    Attributes:
        key: names it; also the last tie-breaker.
        offers: pools that it may use.
        min_workers: gang: with fewer workers it does not run at all.
        max_workers: most workers over all pools.
        batch_samples: the global batch, or the base batch of an adaptive job.
        largest_batch_samples: upper limit of an adaptive batch; ``None`` for a fixed one.
        noise_samples: phi; ``None`` while unknown.
        communication: the exchange as measured with ``communication_members`` members.
        communication_members: ranks; 0 when it was never measured.
        variation: relative standard deviation of a member's step.
        objective: what it wants most.
        remaining_samples: until it is done; ``None`` when unknown.
        deadline_s: with ``Objective.DEADLINE``, seconds from now by which it shall be done; negative when that is over.
        pace: measured samples per second over predicted ones: what checkpoints, evaluation and a wrong model cost.
        pause_s: seconds without progress that one change of membership costs it, measured or assumed.
        weight: its claim relative to others; larger first.
        arrived_s: when it came; earlier first. Only differences matter.
        current: workers that it has now, by the offer's key; empty when it does not run.
    """

    key: str
    offers: tuple[Offer, ...]
    min_workers: int = 1
    max_workers: int
    batch_samples: int
    largest_batch_samples: int | None = None
    noise_samples: float | None = None
    communication: CommunicationTime = field(default_factory=CommunicationTime)
    communication_members: int = 0
    variation: float = 0.0
    objective: Objective = Objective.THROUGHPUT
    remaining_samples: float | None = None
    deadline_s: float | None = None
    pace: float = 1.0
    pause_s: float = 2.0
    weight: float = 1.0
    arrived_s: float = 0.0
    current: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one job gets.

    Attributes:
        key: the job.
        workers: by the offer's key (the pool, unless the job has a name of its own for it), only where there are any;
            empty when it has to wait.
        rate_per_s: expected samples per second (worth as much as the objective says).
        price_per_hour: of all its workers.
        spare_s: seconds between the expected end and the job's deadline, negative when it is late; ``None`` without a
            deadline, without workers, or while the work is not known.
        in_time: whether it was given as a way to meet the deadline: enough, and no more is wanted.
        changed: whether it differs from what the job has.
        reason: why, in one sentence.
    """

    key: str
    workers: Mapping[str, int]
    rate_per_s: float
    price_per_hour: float
    spare_s: float | None = None
    in_time: bool = False
    changed: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Every job's grant, in the order of the demands.

    Attributes:
        grants: one for each job.
        exact: whether no better allocation exists by the stated score; otherwise it was searched for.
        reason: how it was found, in one sentence.
    """

    grants: tuple[Grant, ...]
    exact: bool
    reason: str
