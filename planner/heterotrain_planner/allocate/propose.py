"""Grants for all jobs at once, with the reason for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from heterotrain_planner.allocate.bound import most_gain
from heterotrain_planner.allocate.branch_and_bound import best_choice
from heterotrain_planner.allocate.candidate import Candidate, Choice
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.distance import Distance
from heterotrain_planner.allocate.fair_share import beyond_share, exponents, starting_on_free_nodes
from heterotrain_planner.allocate.problem import Grant, JobDemand, Proposal
from heterotrain_planner.allocate.rate_cache import RateCache
from heterotrain_planner.allocate.reasons import why_granted, why_waiting
from heterotrain_planner.allocate.refinement import refined
from heterotrain_planner.allocate.reservation import RESERVE_AFTER_S, Reservation, reserve
from heterotrain_planner.allocate.search import search
from heterotrain_planner.allocate.value import Option, scored_options

EXACT_JOBS = 12
"""Up to this many jobs branch and bound is tried before the search."""
_SETTLING_ROUNDS = 5
"""How often a searched choice is checked for stability; each check costs another search."""


def propose(capacity: PoolCapacity, jobs: Sequence[JobDemand], *, rate_cache: RateCache | None = None) -> Proposal:
    """Return the workers that each job should have.

    Tenants share the nodes by their weights: see ``fair_share``. Admission goes by weight, then running before waiting,
    then arrival. Beyond minimums, workers go where they add most to the sum of the logarithms of the jobs' objectives,
    each times the job's exponent. A job's current workers count in full. Any other workers bear the cost of the change:
    its pause, over the time that the new workers are expected to last, and a margin. So a change that does not pay is
    not proposed, and proposing again after a proposal was carried out changes nothing.

    Args:
        capacity: of the pools.
        jobs: each key once; the grants come in their order.
        rate_cache: kept by a caller that proposes repeatedly.
    """
    cache = RateCache() if rate_cache is None else rate_cache

    # 1. Leave out waiting jobs whose minimum would take more than their tenant's share from others.
    ordered = in_order_of_admission(jobs)
    beyond = beyond_share(capacity, ordered)
    started: Collection[str] = ()
    if beyond:
        started = starting_on_free_nodes(build_candidates(capacity, ordered, rate_cache=cache), capacity, beyond)

    while True:
        # 2. List each other job's options, in the order of admission: possible numbers of workers, with their scores.
        left_out = {key: reason for key, reason in beyond.items() if key not in started}
        within = [job for job in ordered if job.key not in left_out]
        exponent_of = exponents(within)
        weighted = [replace(job, exponent=exponent_of[job.key]) for job in within]

        # 3. Choose options. A job beyond its share that finds its free nodes taken does not take part: it would
        # otherwise share its tenant's weight now and no longer in the next proposal.
        candidates, choice, exact = _chosen(weighted, capacity, cache)
        runs = {c.job.key for c, option in zip(candidates, choice, strict=True) if option is not None}
        if runs.issuperset(started):
            break
        started = runs.intersection(started)
        del candidates  # before the next ones are listed: they take most of the memory

    # 4. Keep nodes free for a job that waits too long: some later jobs then have to wait as well.
    reservation = reserve(candidates, choice, capacity)
    kept_free: dict[str, str] = {}
    if reservation is not None and not reservation.allows(candidates, choice):
        kept_free = {job.key: _why_kept_free(job, reservation) for job in within if job.key in reservation.excluded}
        restricted = [
            replace(job, least=reservation.footprints.get(job.key, {})) for job in weighted if job.key not in kept_free
        ]
        del candidates
        candidates, choice, exact = _chosen(restricted, capacity, cache)

    # 5. Turn the chosen options into grants, each with its reason.
    grants = {
        candidate.job.key: _grant(candidate, option, capacity)
        for candidate, option in zip(candidates, choice, strict=True)
    }
    if reservation is not None and grants[reservation.holder.key].rate_per_s <= 0:
        grants[reservation.holder.key] = replace(grants[reservation.holder.key], kept_for=True)
    left_out |= kept_free
    grants |= {
        job.key: replace(_no_workers(job, f"waits: {left_out[job.key]}"), kept_out=job.key in kept_free)
        for job in ordered
        if job.key in left_out
    }
    running = sum(option is not None for option in choice)
    distance = Distance(
        gain=0.0 if exact else most_gain(candidates, choice, capacity),
        proved=running == len(jobs) or (exact and not left_out),
    )
    return Proposal(
        grants=tuple(grants[job.key] for job in jobs),
        exact=exact,
        distance=distance,
        reason=f"{running} of {len(jobs)} jobs run; {distance.text}",
    )


def _chosen(
    jobs: Sequence[JobDemand], capacity: PoolCapacity, cache: RateCache
) -> tuple[Sequence[Candidate], Choice, bool]:
    """Return the jobs with their options, one option for each, and whether no choice is better."""
    # 1. Few jobs: try to prove the best choice of all.
    candidates = build_candidates(capacity, jobs, rate_cache=cache)
    occupancy = Occupancy(capacity)
    choice = best_choice(candidates, capacity, occupancy=occupancy) if len(candidates) <= EXACT_JOBS else None
    exact = choice is not None and not occupancy.uncertain

    # 2. Otherwise: search for a good choice that stays the same once it is carried out.
    if choice is None:
        choice = _stable_choice(candidates, capacity, cache)

    # 3. Where options were thinned out: list those close to the choice, and choose again.
    if not all(candidate.complete for candidate in candidates):
        return *refined(candidates, choice, capacity), False
    return candidates, choice, exact


def _why_kept_free(job: JobDemand, reservation: Reservation) -> str:
    holder = reservation.holder
    who = holder.key if holder.tenant == job.tenant else "a job of another namespace"
    return (
        f"{who} came first and has waited for more than {RESERVE_AFTER_S / 60:.0f} minutes, so the nodes that it "
        "needs are kept for it"
    )


def build_candidates(
    capacity: PoolCapacity, jobs: Sequence[JobDemand], *, rate_cache: RateCache | None = None
) -> list[Candidate]:
    """Return every job with its options, in the order of admission."""
    cache = RateCache() if rate_cache is None else rate_cache
    return [_candidate(job, capacity, cache) for job in in_order_of_admission(jobs)]


def in_order_of_admission(jobs: Sequence[JobDemand]) -> list[JobDemand]:
    """Return the jobs by weight, then running before waiting, then by arrival."""
    return sorted(jobs, key=lambda job: (-job.weight, not any(job.current.values()), job.arrived_s, job.key))


def _candidate(job: JobDemand, capacity: PoolCapacity, cache: RateCache) -> Candidate:
    counts_OP, rate_O, complete = cache.of(job, capacity)
    return Candidate(job, scored_options(job, capacity.pools, counts_OP=counts_OP, rate_O=rate_O), complete)


def _stable_choice(candidates: list[Candidate], capacity: PoolCapacity, cache: RateCache) -> Choice:
    """Return a choice that the search would find again once it is carried out.

    Options take most of the memory of an allocation. So each job has one list of them at a time: ``candidates`` changes
    with each round, and in the end it is as it was.
    """
    first = [candidate.job for candidate in candidates]
    choice = search(candidates, capacity)
    for _ in range(_SETTLING_ROUNDS):
        before = [candidate.job for candidate in candidates]
        for i, option in enumerate(choice):
            candidates[i] = _carried_out(candidates[i], option, capacity, cache)
        if all(candidate.job is job for candidate, job in zip(candidates, before, strict=True)):
            break  # every job has its workers already
        again = search(candidates, capacity)
        if all(_counts(a) == _counts(b) for a, b in zip(again, choice, strict=True)):
            break
        if any(o is not None and not _listed(job, o, capacity, cache) for o, job in zip(again, first, strict=True)):
            break  # thinned options depend on the current workers; these come within reach once the choice is made
        choice = again
    for i, job in enumerate(first):
        if candidates[i].job is not job:
            candidates[i] = _candidate(job, capacity, cache)
    return tuple(
        None if option is None else candidate.by_counts[option.counts]
        for option, candidate in zip(choice, candidates, strict=True)
    )


def _listed(job: JobDemand, option: Option, capacity: PoolCapacity, cache: RateCache) -> bool:
    """Return whether a job's options include these workers."""
    counts_OP, _, complete = cache.of(job, capacity)
    return complete or bool((counts_OP == np.array(option.counts)).all(axis=1).any())


def _carried_out(candidate: Candidate, option: Option | None, capacity: PoolCapacity, cache: RateCache) -> Candidate:
    """Return the job as it will be once it has this option's workers."""
    workers = _workers(candidate.job, option)
    if workers == {key: count for key, count in candidate.job.current.items() if count}:
        return candidate
    return _candidate(replace(candidate.job, current=workers), capacity, cache)


def _counts(option: Option | None) -> tuple[int, ...] | None:
    return None if option is None else option.counts


def _workers(job: JobDemand, option: Option | None) -> dict[str, int]:
    if option is None:
        return {}
    return {job_pool.key: count for job_pool, count in zip(job.pools, option.counts, strict=True) if count}


def _grant(candidate: Candidate, option: Option | None, capacity: PoolCapacity) -> Grant:
    job = candidate.job
    now = {key: count for key, count in job.current.items() if count}
    workers = _workers(job, option)
    return Grant(
        key=job.key,
        workers=workers,
        rate_per_s=option.rate_per_s if option else 0.0,
        price_per_hour=option.price_per_hour if option else 0.0,
        spare_s=_spare_s(job, option),
        in_time=option is not None and option.in_time,
        changed=workers != now,
        reason=why_waiting(candidate, capacity) if option is None else why_granted(candidate, option, now, workers),
    )


def _no_workers(job: JobDemand, reason: str) -> Grant:
    changed = any(job.current.values())
    return Grant(key=job.key, workers={}, rate_per_s=0.0, price_per_hour=0.0, changed=changed, reason=reason)


def _spare_s(job: JobDemand, option: Option | None) -> float | None:
    if option is None or option.needed_s is None or job.deadline_s is None:
        return None
    return job.deadline_s - option.needed_s
