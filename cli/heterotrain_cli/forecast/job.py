"""The parts of a job that a forecast needs: pools, limits on their workers, and the speed of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from heterotrain_core.contract.choices import Runtime
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.split.member import SplitMember
from heterotrain_operator.api.pools import CapacityType, WorkerPool
from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.parse import template_patches
from heterotrain_operator.decide.objects.pods import members_per_worker, num_proc_per_worker, patched

from heterotrain_cli.documents import place
from heterotrain_cli.errors import InputError
from heterotrain_cli.job_file import read_job_file
from heterotrain_cli.profile import Profile

Allocation = tuple[int, ...]
"""A number of workers for each pool, in the job's order of pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInput:
    """One pool of the job.

    Attributes:
        name: as in the job.
        ranks: members of one worker: its ranks, unless these hold the model together.
        least_workers, most_workers: limits in the job.
        spot: whether its nodes can be reclaimed.
        price_per_hour: of one worker; ``None`` when not stated.
        micro_batch_samples: largest micro-batch of a rank by the job; ``None`` when not stated.
        rank: time and limits of one rank; ``None`` while its speed is unknown.
        variation: standard deviation of a rank's own time of a step, relative to its mean; ``None`` while unknown.
    """

    name: str
    ranks: int
    least_workers: int
    most_workers: int
    spot: bool
    price_per_hour: float | None
    micro_batch_samples: int | None = None
    rank: SplitMember | None = None
    variation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """A job for a forecast.

    Attributes:
        name, namespace: of the object; the namespace is ``None`` if the file has none.
        batch_samples: the global batch; with an adaptive batch, the first one.
        adaptive: whether the operator chooses the batch.
        pools: in the job's order, the preferred ones first.
        least_workers, most_workers: over all pools.
        even: whether shares stay even (``rebalance.boundary: Never``).
        hiccups: rare long steps of each rank, of a running job.
        epochs: passes over the data.
        steps: of the training; ``None`` where epochs decide.
    """

    name: str
    namespace: str | None
    batch_samples: int
    pools: tuple[PoolInput, ...]
    least_workers: int
    most_workers: int
    even: bool
    epochs: int = 1
    steps: int | None = None
    adaptive: bool = False
    hiccups: Hiccups = NO_HICCUPS


def read_job(path: str) -> JobInput:
    """Return the one HeteroTrainJob in a YAML file; other objects are ignored.

    Raises:
        InputError: the file has no job or several, or the job has a mistake.
    """
    file = read_job_file(path)
    return job_of(file.spec, name=file.name, namespace=file.namespace, body=file.body, where=place(path))


def job_of(
    spec: HeteroTrainJobSpec, *, name: str, namespace: str | None, body: Mapping[str, Any], where: str
) -> JobInput:
    """Return the parts of a job that a forecast needs.

    Args:
        spec: the job's spec.
        name: of the job.
        namespace: of the job; ``None`` if it has none yet.
        body: the whole object.
        where: its place, for the sentence.

    Raises:
        InputError: the job's batch is only known to its script.
    """
    if spec.runtime is Runtime.TORCHRUN:
        raise InputError(
            f"{where}: the batch of a job with runtime: Torchrun is in its script, and all workers get equal "
            "work: to compare, forecast the job with runtime: HeteroTrain and training.globalBatchSize"
        )
    return JobInput(
        name=name,
        namespace=namespace,
        batch_samples=spec.training.base_batch_samples,
        pools=_pools(spec, body["spec"]["template"], template_patches(body["spec"])),
        least_workers=spec.elastic_policy.min_replicas,
        most_workers=most_workers(spec),
        even=spec.training.rebalance.keeps_even,
        epochs=spec.training.passes,
        steps=spec.training.steps,
        adaptive=spec.training.adaptive_batch is not None,
    )


def _pools(
    spec: HeteroTrainJobSpec, template: Mapping[str, Any], patches: Mapping[str, Mapping[str, Any]]
) -> tuple[PoolInput, ...]:
    return tuple(
        PoolInput(
            name=pool.name,
            ranks=members_per_worker(spec, pool, patched(template, patches, pool)),
            least_workers=pool.min_replicas,
            most_workers=pool.max_replicas,
            spot=pool.capacity_type is CapacityType.SPOT,
            price_per_hour=None if pool.price_per_hour is None else float(pool.price_per_hour),
            micro_batch_samples=_micro_batch(spec, pool, patched(template, patches, pool)),
        )
        for pool in spec.worker_pools
    )


def _micro_batch(spec: HeteroTrainJobSpec, pool: WorkerPool, template: Mapping[str, Any]) -> int | None:
    """Return the largest micro-batch of a member in samples; ``None`` where the spec does not limit it."""
    if pool.micro_batch_size is None:
        return None
    processes = num_proc_per_worker(pool, template) // members_per_worker(spec, pool, template)
    return pool.micro_batch_size * processes


def with_profile(job: JobInput, profile: Profile, *, where: str) -> JobInput:
    """Return the job with the speeds of the profile's members, matched to pools by name.

    A member is one rank; its ``count`` is ignored, as the job has the number of workers. A pool without a price takes
    the member's, for each of its ranks.

    Raises:
        InputError: two members have the same name, or a member is not a pool of the job.
    """
    known = {member.name: member for member in profile.members}
    names = [pool.name for pool in job.pools]
    if len(known) < len(profile.members):
        raise InputError(f"{where}: two members have the same name: with a job, give each pool one member")
    if stranger := next((name for name in known if name not in names), None):
        raise InputError(f"{where}: member {stranger} is not a pool of the job: its pools are {', '.join(names)}")
    pools = []
    for pool in job.pools:
        if member := known.get(pool.name):
            price = pool.price_per_hour
            if price is None and member.price_per_hour is not None:
                price = member.price_per_hour * pool.ranks
            caps = [cap for cap in (pool.micro_batch_samples, member.curve.micro_cap_samples) if cap is not None]
            rank = replace(member.curve, micro_cap_samples=min(caps, default=None))
            pools.append(replace(pool, rank=rank, price_per_hour=price, variation=member.variation))
        else:
            pools.append(pool)
    return replace(job, pools=tuple(pools))


def preferred_allocation(job: JobInput) -> Allocation | str:
    """Return the job's allocation when every pool has capacity, or the reason why no forecast is possible.

    Minimums come first, then the pools in the job's order, up to the job's maximum. Pools of unknown speed get no
    worker.
    """
    unknown = [pool for pool in job.pools if pool.rank is None]
    if needed := next((pool for pool in unknown if pool.least_workers), None):
        return (
            f"the speed of pool {needed.name} is unknown, but the job needs at least {needed.least_workers} of its "
            "workers"
        )
    workers = [pool.least_workers for pool in job.pools]
    for index, pool in enumerate(job.pools):
        if pool.rank is not None:
            workers[index] += min(pool.most_workers - workers[index], job.most_workers - sum(workers))
    if sum(workers) < job.least_workers:
        names = ", ".join(pool.name for pool in unknown)
        return (
            f"the job needs {job.least_workers} workers, but without pools of unknown speed ({names}) it has "
            f"{sum(workers)}"
        )
    return tuple(workers)


def ranks_of(job: JobInput, allocation: Allocation) -> tuple[tuple[int, SplitMember], ...]:
    """Return (index of the pool, curve) of each rank of an allocation."""
    return tuple(
        (index, pool.rank)
        for index, (pool, workers) in enumerate(zip(job.pools, allocation, strict=True))
        if pool.rank is not None
        for _ in range(workers * pool.ranks)
    )


def price_per_hour(job: JobInput, allocation: Allocation) -> float | None:
    """Return the price of an allocation; ``None`` if a pool in it has none."""
    total = 0.0
    for pool, workers in zip(job.pools, allocation, strict=True):
        if workers and pool.price_per_hour is None:
            return None
        total += workers * (pool.price_per_hour or 0.0)
    return total
