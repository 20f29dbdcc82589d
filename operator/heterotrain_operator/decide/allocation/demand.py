"""A job's demand for workers on the node groups of its pools, in the terms of the core's allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.choices import Runtime
from heterotrain_core.contract.plan import Plan
from heterotrain_planner.allocate.problem import JobDemand, JobPool
from heterotrain_planner.layout.rates import LayoutRates

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.api.text import rounded
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.allocation.node_group import NodeGroup, PoolKey
from heterotrain_operator.decide.grant import JobGrant
from heterotrain_operator.decide.learn.throughput import ThroughputModel
from heterotrain_operator.decide.objects.pods import members_per_worker, template_of
from heterotrain_operator.decide.plugins import registry as plugins
from heterotrain_operator.decide.work_left import work_left
from heterotrain_operator.decide.workers.state import Worker, WorkerState

MEASURED_WITHIN_S = 300.0
"""Speeds of a new job are known this many seconds after its start, even where thousands of jobs are read in turn."""
PAUSE_S = 1.0
"""Assumed cost of a change of membership until one is measured; docs/benchmarks.md has 0.5 s and 0.7 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Competitor:
    """A job that takes part in the allocation.

    Attributes:
        job: the job.
        workers: all its workers.
        plan: the newest plan, if it is readable.
        telemetry: what Prometheus reported about it.
        throughput: how fast it is, as learned.
        before: its grant from the previous allocation.
        priority: of its pods, by their PriorityClass.
    """

    job: ValidJob
    workers: Sequence[Worker]
    plan: Plan | None
    telemetry: Telemetry
    throughput: ThroughputModel
    before: JobGrant
    priority: int = 0

    @property
    def spec(self) -> HeteroTrainJobSpec:
        """The job's spec."""
        return self.job.spec

    def pool_key(self, pool: WorkerPool) -> PoolKey:
        """Return the key of one of its pools."""
        return PoolKey(self.job.key, pool.name)

    def most(self, pool: WorkerPool) -> int:
        """Return the most workers that a pool may have; for an exhausted pool, those that start on their nodes."""
        if pool.name in self.before.exhausted:
            return sum(w.placed and w.pod.pool == pool.name and not self.is_idle(w) for w in self.workers)
        return min(pool.max_replicas, most_workers(self.spec))

    def is_idle(self, worker: Worker) -> bool:
        """Return whether a worker cannot start in a pool that is exhausted for that reason: it only holds its node."""
        known = self.before.exhausted.get(worker.pod.pool)
        return known is not None and bool(known.why) and worker.cannot_start

    def later(self, pool: WorkerPool, group: NodeGroup) -> int:
        """Return how many workers of a pool come to a node group later, or leave it (below 0)."""
        return 0 if pool.name in self.before.exhausted else self.before.later.get(job_pool_key(pool, group.name), 0)

    @property
    def all_at_once(self) -> bool:
        """Whether its workers are admitted together or not at all, so that none can show that it starts."""
        return plugins.together(self.job)

    def placed_on(self, pool: WorkerPool, group: NodeGroup) -> list[Worker]:
        """Return the workers of a pool on a node group, ready ones first and those that cannot start last."""
        own = [w for w in self.workers if w.placed and w.pod.pool == pool.name and w.pod.node in group.nodes]
        return sorted(own, key=lambda w: (w.state is not WorkerState.READY, w.cannot_start, w.pod.index))

    def placed_outside(self, pool: WorkerPool, groups: Sequence[NodeGroup]) -> int:
        """Return how many workers of a pool are on nodes outside these groups; they may stay there."""
        return sum(
            worker.placed and worker.pod.pool == pool.name and all(worker.pod.node not in g.nodes for g in groups)
            for worker in self.workers
        )


def job_pool_key(pool: WorkerPool, group: str) -> str:
    """Return the core's key of a job's pool on a node group."""
    return JobPool(pool=group, name=pool.name, max_workers=0).key


@dataclass(frozen=True, slots=True, kw_only=True)
class _DemandByPool:
    """A job's demand on each node group of its pools.

    Attributes:
        pools: one for each pool and node group.
        current: workers there by the pools' keys, with those that are promised or come later.
        fixed: workers on nodes outside all groups, which stay there.
    """

    pools: tuple[JobPool, ...]
    current: Mapping[str, int]
    fixed: int


def demand_of(
    competitor: Competitor,
    groups_of: Mapping[str, Sequence[NodeGroup]],
    *,
    namespace_weight: float,
    now_s: float,
    layouts: LayoutRates | None = None,
    weight: float = 1.0,
) -> JobDemand:
    """Return the job's demand.

    Args:
        competitor: the job.
        groups_of: by pool, the node groups that are open to it; empty where none is.
        namespace_weight: of the job's namespace.
        now_s: now, in seconds since the epoch.
        layouts: rates of the job's best layouts, where its members are planned.
        weight: by its priority.
    """
    job, spec, throughput = competitor.job, competitor.spec, competitor.throughput
    by_pool = _by_pool(competitor, groups_of)
    adaptive, newest = spec.training.adaptive_batch, competitor.telemetry.newest
    left = work_left(spec.training, newest)
    return JobDemand(
        key="/".join(job.key),
        pools=by_pool.pools,
        min_workers=max(0, spec.elastic_policy.min_replicas - by_pool.fixed),
        max_workers=max(0, most_workers(spec) - by_pool.fixed),
        batch_samples=_batch(spec, by_pool.pools),
        largest_batch_samples=adaptive.most_samples if adaptive is not None else None,
        noise_samples=_coarse(newest.noise_scale_samples) if newest is not None else None,
        communication=throughput.communication,
        communication_members=throughput.communication_members,
        exchange_seen=throughput.exchange_seen,
        variation=throughput.variation,
        hiccups=throughput.hiccups,
        objective=spec.objective,
        remaining_samples=None if left is None else float(left.samples),
        deadline_s=spec.deadline.timestamp() - now_s if spec.deadline is not None else None,
        pace=throughput.pace,
        pause_s=competitor.telemetry.pause_s or PAUSE_S,
        weight=weight,
        tenant=job.key.namespace,
        tenant_weight=namespace_weight,
        arrived_s=job.created_s,
        waited_s=max(0.0, now_s - job.created_s),
        current=by_pool.current,
        granted=_granted(competitor, groups_of),
        measured_soon=_measured_soon(competitor, now_s=now_s),
        layouts=layouts,
    )


def _by_pool(competitor: Competitor, groups_of: Mapping[str, Sequence[NodeGroup]]) -> _DemandByPool:
    pools: list[JobPool] = []
    current: dict[str, int] = {}
    fixed = 0
    starting = competitor.plan is None or not competitor.plan.members
    for pool in competitor.spec.worker_pools:
        groups = groups_of[pool.name]
        there = competitor.placed_outside(pool, groups)
        fixed += there
        template = JobPool(
            pool=f"nodes of {pool.name}",
            name=pool.name,
            min_workers=max(0, pool.min_replicas - there),
            required=starting,  # training does not start without it, but it continues
            max_workers=max(0, competitor.most(pool) - there),
            ranks=members_per_worker(competitor.spec, pool, template_of(competitor.job, pool)),
            price_per_hour=float(pool.price_per_hour or 0.0),
            member=competitor.throughput.members.get(pool.name),
        )
        if not groups:
            pools.append(template)
        promised = _promised(competitor, pool)
        for group in groups:
            size = group.sizes[competitor.pool_key(pool)]
            pools.append(replace(template, pool=group.name, accelerators=size))
            here = sum(not competitor.is_idle(worker) for worker in competitor.placed_on(pool, group))
            # What is only postponed counts as done: otherwise each half of a change would have to pay for a pause.
            current[pools[-1].key] = max(0, here + promised + competitor.later(pool, group))
            promised = 0
    return _DemandByPool(pools=tuple(pools), current=current, fixed=fixed)


def _granted(competitor: Competitor, groups_of: Mapping[str, Sequence[NodeGroup]]) -> dict[str, int]:
    """Return the granted workers of a job without any, where it is known on which node group each of them is."""
    limits = competitor.before.limits
    if limits is None or competitor.workers or any(len(groups_of[name]) > 1 for name, n in limits.items() if n):
        return {}
    pools = {pool.name: pool for pool in competitor.spec.worker_pools}
    return {
        job_pool_key(pools[name], groups_of[name][0].name): n for name, n in limits.items() if n and groups_of.get(name)
    }


def _measured_soon(competitor: Competitor, *, now_s: float) -> bool:
    """Return whether the job has begun a short while ago, so that its first speeds are about to be known."""
    if competitor.throughput.members or competitor.telemetry.reason == "NotConfigured":
        return False
    since_s = seconds(competitor.job.status.training_since or competitor.job.status.start_time)
    return not since_s or now_s - since_s < MEASURED_WITHIN_S


def _batch(spec: HeteroTrainJobSpec, job_pools: Sequence[JobPool]) -> int:
    """Return the job's batch; for a script that has its own, one sample for each rank that the job may have."""
    if spec.runtime is Runtime.TORCHRUN:
        return max(1, sum(pool.max_workers * pool.ranks for pool in job_pools))
    return spec.training.base_batch_samples


def _coarse(noise_samples: float | None) -> float | None:
    """Return the noise scale with two digits: more would change with each scrape, and every job be valued again."""
    return None if noise_samples is None else rounded(noise_samples, digits=2)


def _promised(competitor: Competitor, pool: WorkerPool) -> int:
    """Return how many workers of a pool wait for a granted node; they count as if they were there."""
    own = [worker for worker in competitor.workers if worker.pod.pool == pool.name]
    limit = (competitor.before.limits or {}).get(pool.name, 0)
    missing = max(0, limit - sum(worker.placed for worker in own))
    return min(sum(worker.state is WorkerState.WAITING for worker in own), missing, competitor.most(pool))
