"""Inputs and results of an allocation: pools and jobs in, one grant for each job out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heterotrain_core.contract.choices import Objective
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.member import SplitMember

from heterotrain_planner.layout.rates import LayoutRates
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen

Size = int | tuple[int, ...]
"""Capacity of a node, or need of a worker: accelerators, or several resources in one order for the whole pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A set of nodes with one kind of accelerator.

    Attributes:
        name: as in ``JobPool.pool``.
        nodes: accelerators (or amounts of several resources) on each node that jobs of this allocation may use,
            including those that jobs of this allocation use now.
        spot: whether its workers may be taken away at any time.
        growth: accelerators on each further node that the provider would start on demand.
        out_of_stock: the provider has refused a node lately, so no further nodes can be had for now.
        losses: known losses of workers; a fraction where a loss may belong to another pool.
        watched_s: worker-seconds over which they occurred.
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
        """The capacity of each node that can be used now."""
        return self.nodes if self.out_of_stock else self.nodes + self.growth


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPool:
    """One job's terms for one pool: limits, size and price of its workers, and their speed.

    A job may use several pools under one name of its own, because only some of their nodes are open to other jobs. Such
    entries follow each other, share their limits (with equal numbers) and differ in ``pool``.

    Attributes:
        pool: the pool's name.
        name: the job's own name for it; empty for ``pool``.
        min_workers: workers that the job always has there when it runs; waived while the pool lacks them, unless
            ``required``.
        required: whether the job does not run without its minimum there.
        max_workers: most workers.
        accelerators: need of one worker, all on one node, in the terms of ``Pool.nodes``; 0 counts as 1.
        ranks: members that one worker runs.
        price_per_hour: of one worker.
        member: one rank's time curve and limits; ``None`` while unknown, when all such members count as equal.
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
        """The need of one worker, at least 1."""
        return self.accelerators or 1

    @property
    def key(self) -> str:
        """A name that is unique within the job."""
        return f"{self.name} on {self.pool}" if self.name else self.pool

    @property
    def label(self) -> str:
        """The job's own name for the pool."""
        return self.name or self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """One job's limits, speed, objective and current workers.

    Attributes:
        key: unique name; also the last tie-breaker.
        pools: pools that it may use.
        min_workers: gang size: with fewer workers it does not run at all.
        max_workers: most workers over all pools.
        batch_samples: the global batch, or the base batch of an adaptive job.
        largest_batch_samples: upper limit of an adaptive batch; ``None`` for a fixed one.
        noise_samples: phi; ``None`` while unknown.
        communication: the exchange as measured with ``communication_members`` members.
        communication_members: ranks; 0 when it was never measured.
        exchange_seen: the exchange as measured with several numbers of members, the newest last; empty where only
            ``communication`` is known.
        variation: relative standard deviation of a member's step, without hiccups.
        hiccups: rare long steps of a member.
        objective: the quantity that it maximises.
        remaining_samples: until it is done; ``None`` when unknown.
        deadline_s: with ``Objective.DEADLINE``, seconds from now until the deadline; negative once that has passed.
        pace: measured samples per second over predicted ones; below 1 because of checkpoints, evaluation or a wrong
            model.
        pause_s: seconds without progress that one change of membership costs it, measured or assumed.
        weight: its priority; jobs with a larger weight are admitted first, and their scores count more.
        tenant: the namespace or team that it belongs to; tenants share the nodes by ``tenant_weight``, the same for all
            jobs of a tenant.
        tenant_weight: above 0.
        exponent: its exponent of the fair product; ``propose`` sets it.
        arrived_s: arrival time; earlier first. Only differences matter.
        waited_s: seconds since its arrival, for a job that waits; decides when nodes are kept for it.
        current: current workers by ``JobPool.key``; empty when it does not run.
        granted: workers by ``JobPool.key`` that the last proposal gave it, while it has none yet.
        measured_soon: whether it has just begun, so that its first speeds are about to be measured.
        layouts: rates of a job whose members are planned, by devices of the kinds that ``JobPool.label`` names; they
            take the place of the members' times.
    """

    key: str
    pools: tuple[JobPool, ...]
    min_workers: int = 1
    max_workers: int
    batch_samples: int
    largest_batch_samples: int | None = None
    noise_samples: float | None = None
    communication: CommunicationTime = field(default_factory=CommunicationTime)
    communication_members: int = 0
    exchange_seen: tuple[ExchangeSeen, ...] = ()
    variation: float = 0.0
    hiccups: Hiccups = NO_HICCUPS
    objective: Objective = Objective.THROUGHPUT
    remaining_samples: float | None = None
    deadline_s: float | None = None
    pace: float = 1.0
    pause_s: float = 2.0
    weight: float = 1.0
    tenant: str = ""
    tenant_weight: float = 1.0
    exponent: float = 1.0
    arrived_s: float = 0.0
    waited_s: float = 0.0
    current: Mapping[str, int] = field(default_factory=dict)
    granted: Mapping[str, int] = field(default_factory=dict)
    measured_soon: bool = False
    layouts: LayoutRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The workers of one job.

    Attributes:
        key: the job.
        workers: by ``JobPool.key`` (the pool, unless the job has a name of its own for it), without zeros; empty when
            the job has to wait.
        rate_per_s: expected samples per second, weighted as the objective asks.
        price_per_hour: of all its workers.
        spare_s: seconds between the expected end and the job's deadline, negative when it is late; ``None`` without a
            deadline, without workers, or while the work is not known.
        in_time: whether it meets the deadline, so that the job needs no more workers.
        changed: whether it differs from the current workers.
        kept_out: whether free nodes are kept for another job, so that it must not take any.
        kept_for: whether it waits, and nodes are kept for it.
        starts_within_s: while nodes are kept for it, seconds after which it starts at the latest, at the predicted
            rates and unless jobs of a larger weight come; ``None`` where run times are not known.
        reason: why, in one sentence.
    """

    key: str
    workers: Mapping[str, int]
    rate_per_s: float
    price_per_hour: float
    spare_s: float | None = None
    in_time: bool = False
    changed: bool
    kept_out: bool = False
    kept_for: bool = False
    starts_within_s: float | None = None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Every job's grant, in the order of the demands.

    Attributes:
        grants: one for each job.
        exact: whether it is proved that no allocation of the jobs that run has a better score, beyond what a change has
            to gain. Which jobs run follows from the order of admission.
        most_gain: how much better the best of the listed numbers of workers may be for these jobs: 0.003 for 0.3 %.
        reason: how many jobs run and how good their allocation is, in one sentence.
    """

    grants: tuple[Grant, ...]
    exact: bool
    most_gain: float
    reason: str
