"""Grants for all jobs at once, with the reason for each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from heterotrain_planner.allocate.admission import Admission, Counts
from heterotrain_planner.allocate.candidate import Candidate, Choice
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.fair_share import beyond_share, exponents, starting_on_free_nodes
from heterotrain_planner.allocate.problem import Grant, JobDemand, Proposal
from heterotrain_planner.allocate.rate_cache import RateCache
from heterotrain_planner.allocate.reasons import why_granted, why_waiting
from heterotrain_planner.allocate.refinement import with_close_options
from heterotrain_planner.allocate.reservation import RESERVE_AFTER_S, reserve
from heterotrain_planner.allocate.sharing import share
from heterotrain_planner.allocate.value import Option, scored_options, timed

_ROUNDS = 6
"""How often a choice is improved at most, with options close to it or with the scores that it leads to."""
_EQUAL = 1e-9
_PROVED = 1e-3
"""Gain below which no allocation counts as better: a change has to gain more to be worth its cost."""


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

    # 1. Decide who runs, within the tenants' shares.
    candidates, admitted, admission, left_out = _admitted(capacity, jobs, cache)

    # 2. Keep nodes free for jobs that wait too long: some later jobs then have to wait as well.
    reserved = reserve(candidates, admitted, admission)
    excluded = reserved.excluded
    kept_out = {job.key: _why_kept_out(job, excluded[job.key]) for job in jobs if job.key in excluded}
    if kept_out:
        remaining = [i for i, candidate in enumerate(candidates) if candidate.job.key not in kept_out]
        admitted = admission.first([], remaining, _current(candidates)) or {}

    # 3. Decide how many workers each of them gets, and turn that into grants, each with its reason.
    shared = _shared(candidates, admitted, admission, capacity, cache)
    grants = {
        candidate.job.key: _grant(candidate, option, capacity)
        for candidate, option in zip(shared.candidates, shared.choice, strict=True)
    }
    for key, start_s in reserved.starts_s.items():
        if not grants[key].workers:
            within_s = start_s if math.isfinite(start_s) else None
            grants[key] = replace(grants[key], kept_for=True, starts_within_s=within_s)
    left_out |= kept_out
    grants |= {
        job.key: replace(_no_workers(job, f"waits: {left_out[job.key]}"), kept_out=job.key in kept_out)
        for job in jobs
        if job.key in left_out
    }
    running = len(admitted)
    exact = shared.certain and shared.complete and shared.gain < _PROVED
    return Proposal(
        grants=tuple(grants[job.key] for job in jobs),
        exact=exact,
        most_gain=shared.gain,
        reason=f"{running} of {len(jobs)} jobs run; {_how_good(shared)}",
    )


def _admitted(
    capacity: PoolCapacity, jobs: Sequence[JobDemand], cache: RateCache
) -> tuple[list[Candidate], dict[int, Counts], Admission, dict[str, str]]:
    """Return the jobs with their options, those that run, how that was decided, and why others do not take part."""
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
        candidates = build_candidates(capacity, weighted, rate_cache=cache)

        # 3. Decide who runs. A job beyond its share that finds its free nodes taken does not take part: it would
        # otherwise share its tenant's weight now and no longer in the next proposal.
        admission = Admission(candidates, capacity)
        admitted = admission.first([], range(len(candidates)), _current(candidates)) or {}
        runs = {candidates[i].job.key for i in admitted}
        if runs.issuperset(started):
            return candidates, admitted, admission, left_out
        started = runs.intersection(started)
        del candidates  # before the next ones are listed: they take most of the memory


class _Outcome(NamedTuple):
    """The options of all jobs.

    Attributes:
        candidates: the jobs, with further options where these were thinned out.
        choice: an option of each job, ``None`` for one that waits.
        gain: how much better the best listed options for the jobs that run may be: 0.003 for 0.3 %. It is the gain of
            the weighted geometric mean of the jobs' objectives.
        certain: whether every packing of workers was decided.
        complete: whether all possible numbers of workers are listed.
    """

    candidates: Sequence[Candidate]
    choice: Choice
    gain: float
    certain: bool
    complete: bool


def _shared(
    candidates: Sequence[Candidate],
    admitted: Mapping[int, Counts],
    admission: Admission,
    capacity: PoolCapacity,
    cache: RateCache,
) -> _Outcome:
    """Return the best options of the jobs that run, which stay the best once they are carried out."""
    places = sorted(admitted)
    jobs = [candidates[i] for i in places]
    found = share(
        jobs, admission.rows, [candidate.index_of(admitted[i]) for i, candidate in zip(places, jobs, strict=True)]
    )

    # 1. Where options were thinned out: list those close to the choice, and choose again.
    complete = all(candidate.complete for candidate in jobs)
    for _ in range(0 if complete else _ROUNDS):
        choice = [candidate.options[option] for candidate, option in zip(jobs, found.options, strict=True)]
        jobs = with_close_options(jobs, choice, capacity)
        start = [candidate.index_of(option.counts) for candidate, option in zip(jobs, choice, strict=True)]
        value, found = found.value, share(jobs, admission.rows, start)
        if found.value <= value + _EQUAL:
            break

    # 2. A deadline may count another set of workers as in time once these are there: choose as if they were.
    counts = [candidate.options[option].counts for candidate, option in zip(jobs, found.options, strict=True)]
    for _ in range(_ROUNDS if complete else 0):
        if not any(
            _rose(c, _carried_out(c, own, capacity, cache), own)
            for c, own in zip(jobs, counts, strict=True)
            if timed(c.job)
        ):
            break
        then = [_carried_out(c, own, capacity, cache) for c, own in zip(jobs, counts, strict=True)]
        start = [candidate.index_of(own) for candidate, own in zip(then, counts, strict=True)]
        again = share(then, admission.rows, start)
        settled = [candidate.options[option].counts for candidate, option in zip(then, again.options, strict=True)]
        if settled == counts:
            break
        counts = settled

    everyone = list(candidates)
    chosen: list[Option | None] = [None] * len(everyone)
    for i, candidate, own in zip(places, jobs, counts, strict=True):
        everyone[i], chosen[i] = candidate, candidate.by_counts[own]
    weight = sum(candidate.job.weight * candidate.job.exponent for candidate in jobs)
    gain = math.expm1(min(700.0, max(0.0, found.bound - found.value) / max(weight, 1e-300)))
    return _Outcome(everyone, tuple(chosen), gain, found.certain, complete)


def _how_good(outcome: _Outcome) -> str:
    """Return what is proved about a choice, in words."""
    which = "" if outcome.complete else "listed "
    if outcome.gain < _PROVED:
        return f"no {which}allocation for these is better"
    return f"at most {math.ceil(1000 * outcome.gain) / 10:.1f} % from the best {which}allocation for these"


def _why_kept_out(job: JobDemand, holder: JobDemand) -> str:
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


def _current(candidates: Sequence[Candidate]) -> dict[int, Counts]:
    """Return the workers that running jobs have, by position."""
    return {
        i: tuple(candidate.job.current.get(job_pool.key, 0) for job_pool in candidate.job.pools)
        for i, candidate in enumerate(candidates)
        if any(candidate.job.current.values())
    }


def _carried_out(candidate: Candidate, counts: Counts, capacity: PoolCapacity, cache: RateCache) -> Candidate:
    """Return the job as it will be once it has these workers."""
    workers = _workers(candidate.job, counts)
    if workers == {key: count for key, count in candidate.job.current.items() if count}:
        return candidate
    return _candidate(replace(candidate.job, current=workers), capacity, cache)


def _rose(before: Candidate, after: Candidate, counts: Counts) -> bool:
    """Return whether other workers than these have a better score than before.

    The cost of a change makes all others worse. Only with a deadline may a smaller saving be enough from then on.
    """
    return before is not after and any(
        option.score > before.by_counts[option.counts].score + _EQUAL
        for option in after.options
        if option.counts != counts and option.counts in before.by_counts
    )


def _workers(job: JobDemand, counts: Counts) -> dict[str, int]:
    return {job_pool.key: count for job_pool, count in zip(job.pools, counts, strict=True) if count}


def _grant(candidate: Candidate, option: Option | None, capacity: PoolCapacity) -> Grant:
    job = candidate.job
    now = {key: count for key, count in job.current.items() if count}
    workers = {} if option is None else _workers(job, option.counts)
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
