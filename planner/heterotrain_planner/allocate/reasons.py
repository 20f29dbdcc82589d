"""Reasons for a job's workers or its wait: one sentence, shown in the job's status."""

from __future__ import annotations

from collections.abc import Mapping

from heterotrain_planner.allocate.candidate import Candidate
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand
from heterotrain_planner.allocate.value import Option


def why_waiting(candidate: Candidate, capacity: PoolCapacity) -> str:
    """Return why the job gets no workers."""
    job = candidate.job
    slots = [capacity.slots(job_pool.pool, job_pool.size) for job_pool in job.pools]
    most: dict[str, int] = {}
    for count, job_pool in zip(slots, job.pools, strict=True):
        most[job_pool.label] = min(most.get(job_pool.label, 0) + count, job_pool.max_workers)
    for job_pool in job.pools:
        label = job_pool.label
        if job_pool.required and most[label] < job_pool.min_workers:
            return f"waits: it needs {_count(job_pool.min_workers)} in {label}, which holds {most[label]}"
    reachable = min(sum(most.values()), job.max_workers)
    if reachable < max(1, job.min_workers):
        exhausted = [
            job_pool.label
            for count, job_pool in zip(slots, job.pools, strict=True)
            if count < job_pool.max_workers
            and job_pool.pool in capacity.pools
            and capacity.pools[job_pool.pool].out_of_stock
        ]
        why = f"; {', '.join(exhausted)} out of stock" if exhausted else ""
        return f"waits: it needs {_count(job.min_workers)} and its pools hold {reachable}{why}"
    if not candidate.options:
        return (
            f"waits: no allowed number of workers can share a batch of {job.batch_samples} samples within their limits"
        )
    if job.min_workers <= 1:
        return "waits: jobs before it leave no free nodes"
    return f"waits: jobs before it leave fewer than its {job.min_workers} workers"


def why_granted(candidate: Candidate, option: Option, now: Mapping[str, int], workers: Mapping[str, int]) -> str:
    """Return why the job gets these workers.

    Args:
        candidate: the job.
        option: its chosen option.
        now: its current workers by key; empty when it does not run.
        workers: the option's workers by key.
    """
    job = candidate.job
    have, get = _by_label(job, now), _by_label(job, workers)
    what = " + ".join(f"{count} {label}" for label, count in get.items())
    measured = any(job_pool.member is not None for job_pool in job.pools)
    late = ""
    if option.needed_s is not None:
        late = ", in time for its deadline" if option.in_time else ", too late for its deadline"
    speed = f"{option.rate_per_s:.4g} samples/s{late}" if measured else f"speeds are not known yet{late}"
    if not now:
        return f"starts with {what}: {speed}"
    before = candidate.by_counts.get(tuple(now.get(job_pool.key, 0) for job_pool in job.pools))
    if workers == dict(now):
        best = candidate.options[0]
        if best is option:
            return f"stays with {what}: no change is worth its cost ({speed})"
        return f"stays with {what}: other jobs need the workers that would make it faster ({speed})"
    moves = ", ".join(
        f"{get.get(label, 0) - have.get(label, 0):+d} {label}"
        for label in sorted({*get, *have})
        if get.get(label, 0) != have.get(label, 0)
    )
    moves = moves or "the same numbers on other nodes"
    gives = f"; {what} give {speed}" if measured else f"; {speed}"
    if before is None:
        return f"{moves}: its current workers are no longer possible{gives}"
    gain = option.rate_per_s / before.rate_per_s - 1
    if option.score < before.score:
        return f"{moves}: other jobs need them more{gives}"
    pays = f", pays for a pause of {job.pause_s:.3g} s in {job.pause_s * (1 + 1 / gain):.3g} s" if gain > 0 else ""
    price = ""
    if option.price_per_hour != before.price_per_hour:
        price = f", {option.price_per_hour:.4g} instead of {before.price_per_hour:.4g} an hour"
    return f"{moves}: {gain:+.1%} speed{pays}{price}{gives}"


def _count(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


def _by_label(job: JobDemand, workers: Mapping[str, int]) -> dict[str, int]:
    """Return the workers by the job's own names of its pools, in the order of its pools."""
    label_of = {job_pool.key: job_pool.label for job_pool in job.pools}
    found: dict[str, int] = {}
    for key in [*label_of, *(key for key in workers if key not in label_of)]:
        if workers.get(key, 0):
            label = label_of.get(key, key)
            found[label] = found.get(label, 0) + workers[key]
    return found
