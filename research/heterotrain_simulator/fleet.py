"""Many jobs on shared pools: the operator's allocation in simulated time.

Events are arrivals and completions of jobs, and nodes that join or leave. The allocator runs at each of them, as the
operator does. A job whose workers change makes no progress during its pause. Between events a job runs at the rate of
the true optimal split of its workers, without noise: the fleet tests allocations, the engine tests shares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from heterotrain_core.contract.choices import Objective
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Pool
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange

from heterotrain_simulator.buckets import Network, two_terms
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.scenario import Change, Group, Scenario
from heterotrain_simulator.schedulers import Allocator
from heterotrain_simulator.workloads import Workload, straight_line

_HOUR_S = 3600.0
_DONE = 1e-6
_TIMED_STEPS = 1000
"""Exchanges that a measurement of a job rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """One job.

    Attributes:
        key: its name.
        workload: its model and data.
        batch_samples: its global batch.
        samples: work until it is done.
        arrived_s: time of its arrival.
        min_workers, max_workers: over all pools.
        pause_s: seconds without progress at each change of its workers.
    """

    key: str
    workload: Workload
    batch_samples: int
    samples: float
    arrived_s: float
    min_workers: int = 1
    max_workers: int
    pause_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Pools with one worker on each node, their changes, and the arriving jobs."""

    groups: tuple[Group, ...]
    spot: frozenset[str] = frozenset()
    changes: tuple[Change, ...] = ()
    network: Network
    jobs: tuple[FleetJob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """The result of a fleet.

    Attributes:
        finished_s: end of each job; unfinished jobs are missing.
        waited_s: seconds without a worker of each job.
        changes: changes of workers over all jobs.
        worker_s: worker-seconds held.
        cost: US dollars for the workers of jobs.
        end_s: end of the last job.
    """

    finished_s: Mapping[str, float]
    waited_s: Mapping[str, float]
    changes: int
    worker_s: float
    cost: float
    end_s: float


def run_fleet(fleet: Fleet, allocator: Allocator) -> FleetResult:
    """Run all jobs to their end, or until no event is left."""
    run = _FleetRun(fleet=fleet, allocator=allocator)
    run.prepare()
    while run.step():
        pass
    return run.result()


@dataclass(slots=True)
class _ActiveJob:
    job: FleetJob
    left: float
    workers: dict[str, int] = field(default_factory=dict)
    resumes_s: float = 0.0
    waited_s: float = 0.0
    exchange: MeasuredExchange = field(default_factory=MeasuredExchange)


@dataclass(slots=True)
class _FleetRun:
    fleet: Fleet
    allocator: Allocator
    now_s: float = 0.0
    nodes: dict[str, int] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    watched_s: dict[str, float] = field(default_factory=dict)
    active: dict[str, _ActiveJob] = field(default_factory=dict)
    finished_s: dict[str, float] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)
    events: list[tuple[float, int, FleetJob | Change]] = field(default_factory=list)
    truths: dict[str, GroundTruth] = field(default_factory=dict)
    rates: dict[object, float] = field(default_factory=dict)
    changes: int = 0
    worker_s: float = 0.0
    cost: float = 0.0

    def prepare(self) -> None:
        """Queue all events."""
        for group in self.fleet.groups:
            self.nodes[group.pool] = group.count
        coming: list[FleetJob | Change] = [*self.fleet.changes, *self.fleet.jobs]
        for order, event in enumerate(coming):
            at_s = event.at_s if isinstance(event, Change) else event.arrived_s
            heapq.heappush(self.events, (at_s, order, event))

    def step(self) -> bool:
        """Advance to the next event and run the allocator; return whether there was an event."""
        ends = [self._ends_s(active) for active in self.active.values()]
        next_s = min([*ends, self.events[0][0] if self.events else math.inf])
        if math.isinf(next_s):
            return False
        self._pass(next_s)
        for key, active in list(self.active.items()):
            if active.left <= _DONE * active.job.samples:
                self.finished_s[key], self.waited_s[key] = self.now_s, active.waited_s
                del self.active[key]
        while self.events and self.events[0][0] <= self.now_s:
            event = heapq.heappop(self.events)[2]
            if isinstance(event, Change):
                self._change(event)
            else:
                self.active[event.key] = _ActiveJob(job=event, left=event.samples)
        self._allocate()
        return True

    def _ends_s(self, active: _ActiveJob) -> float:
        rate = self._rate(active)
        return max(self.now_s, active.resumes_s) + active.left / rate if rate > 0 else math.inf

    def _pass(self, until_s: float) -> None:
        """Advance work, waiting times and cost to a time."""
        seconds = until_s - self.now_s
        prices = {group.pool: group.price_per_hour for group in self.fleet.groups}
        for active in self.active.values():
            if not active.workers:
                active.waited_s += seconds
            working_s = max(0.0, until_s - max(self.now_s, active.resumes_s))
            active.left -= working_s * self._rate(active)
            for pool, count in active.workers.items():
                self.worker_s += count * seconds
                self.cost += count * prices[pool] * seconds / _HOUR_S
        for pool, count in self.nodes.items():
            self.watched_s[pool] = self.watched_s.get(pool, 0.0) + count * seconds
        self.now_s = until_s

    def _change(self, change: Change) -> None:
        """Remove nodes, free ones first and then from the job with the most of them, or add nodes."""
        have = self.nodes.get(change.pool, 0)
        lost = min(change.lost, have)
        self.losses[change.pool] = self.losses.get(change.pool, 0) + lost
        free = have - sum(active.workers.get(change.pool, 0) for active in self.active.values())
        for _ in range(max(0, lost - free)):
            holder = max(self.active.values(), key=lambda active: (active.workers.get(change.pool, 0), active.job.key))
            holder.workers[change.pool] -= 1
            holder.workers = {pool: count for pool, count in holder.workers.items() if count}
            self._pause(holder)
        self.nodes[change.pool] = have - lost + change.joined

    def _pause(self, active: _ActiveJob) -> None:
        self.changes += 1
        active.resumes_s = self.now_s + active.job.pause_s

    def _allocate(self) -> None:
        if not self.active:
            return
        pools = [
            Pool(
                name=pool,
                nodes=(1,) * count,
                spot=pool in self.fleet.spot,
                losses=self.losses.get(pool, 0),
                watched_s=self.watched_s.get(pool, 0.0),
            )
            for pool, count in self.nodes.items()
        ]
        demands = [self._demand(active) for active in self.active.values()]
        grants = self.allocator(pools, demands)
        for key, active in self.active.items():
            workers = {pool: count for pool, count in grants.get(key, {}).items() if count}
            if workers != active.workers:
                active.workers = workers
                if workers:
                    self._pause(active)

    def _demand(self, active: _ActiveJob) -> JobDemand:
        job = active.job
        current = dict(active.workers) if sum(active.workers.values()) >= job.min_workers else {}
        ranks = max(2, sum(current.values()))
        truth = self._truth(job)
        if ranks != active.exchange.members:
            known = replace(active.exchange, communication=two_terms(truth.buckets, truth.transfer_s(ranks)))
            active.exchange = known.measured_among(ranks, across=True, steps=_TIMED_STEPS)
        return JobDemand(
            key=job.key,
            pools=tuple(
                JobPool(
                    pool=group.pool,
                    max_workers=job.max_workers,
                    price_per_hour=group.price_per_hour,
                    member=straight_line(job.workload, group.gpu),
                )
                for group in self.fleet.groups
                if group.gpu in job.workload.step_ms
            ),
            min_workers=job.min_workers,
            max_workers=job.max_workers,
            batch_samples=job.batch_samples,
            communication=active.exchange.communication,
            communication_members=ranks,
            exchange_seen=active.exchange.seen,
            objective=Objective.THROUGHPUT,
            remaining_samples=active.left,
            pause_s=job.pause_s,
            arrived_s=job.arrived_s,
            current=current,
        )

    def _truth(self, job: FleetJob) -> GroundTruth:
        if job.workload.name not in self.truths:
            self.truths[job.workload.name] = GroundTruth(
                Scenario(
                    name=job.workload.name,
                    workload=job.workload,
                    groups=tuple(group for group in self.fleet.groups if group.gpu in job.workload.step_ms),
                    network=self.fleet.network,
                    batch_samples=job.batch_samples,
                )
            )
        return self.truths[job.workload.name]

    def _rate(self, active: _ActiveJob) -> float:
        """Return samples per second of the true optimal split of the job's workers."""
        job = active.job
        if not active.workers or sum(active.workers.values()) < job.min_workers:
            return 0.0
        key = (job.workload.name, job.batch_samples, tuple(sorted(active.workers.items())))
        if key not in self.rates:
            gpus = {group.pool: group.gpu for group in self.fleet.groups}
            workers = [
                Worker(name=f"{pool}-{i}", pool=pool, gpu=gpus[pool], index=i)
                for pool, count in sorted(active.workers.items())
                for i in range(count)
            ]
            best = self._truth(job).optimum(workers, job.batch_samples, 0.0)
            self.rates[key] = job.batch_samples / best.step_s if best is not None else 0.0
        return self.rates[key]

    def result(self) -> FleetResult:
        """Return the result of the fleet."""
        return FleetResult(
            finished_s=dict(self.finished_s),
            waited_s=dict(self.waited_s),
            changes=self.changes,
            worker_s=self.worker_s,
            cost=self.cost,
            end_s=max(self.finished_s.values(), default=0.0),
        )
