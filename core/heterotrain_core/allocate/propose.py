"""Grants for all jobs at once, with the reason for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from heterotrain_core.allocate.candidate import Candidate, Choice
from heterotrain_core.allocate.capacity import Room
from heterotrain_core.allocate.exact import exact
from heterotrain_core.allocate.problem import Grant, JobDemand, Pool, Proposal
from heterotrain_core.allocate.search import searched
from heterotrain_core.allocate.value import Floats, Ints, Option, options, possible_counts, rates, thinned_out

EXACT_JOBS = 12
_SETTLING = 5


class KnownRates:
    """Options of jobs with their rates, which take longest to find out and seldom change, from one proposal to the next."""

    def __init__(self) -> None:
        """Know nothing."""
        self._known: dict[tuple[object, ...], tuple[Ints, Floats]] = {}
        self._used: set[tuple[object, ...]] = set()

    def __len__(self) -> int:
        """Return of how many kinds of jobs something is known."""
        return len(self._known)

    def of(self, job: JobDemand, room: Room) -> tuple[Ints, Floats]:
        """Return the numbers of workers from each offer that are possible, one row each, and the rate of each row.

        Args:
            job: the demand.
            room: any; only what it holds when it is empty counts.
        """
        places = tuple(room.places(offer.pool, offer.size) for offer in job.offers)
        # Jobs from one template have the same rates whatever their names, and whatever they still have to do.
        key: tuple[object, ...] = (
            places, job.offers, job.min_workers, job.max_workers, job.batch_samples, job.largest_batch_samples,
            job.noise_samples, job.communication, job.communication_members, job.variation, job.objective,
            tuple(sorted(job.current.items())) if thinned_out(job, places) else (),
        )  # fmt: skip
        self._used.add(key)
        if key not in self._known:
            counts_OP = possible_counts(job, places)
            rate_O = rates(job, counts_OP) if len(counts_OP) else counts_OP.sum(axis=1) * 1.0
            self._known[key] = (counts_OP, rate_O)
        return self._known[key]

    def forget_unused(self) -> None:
        """Drop what was not asked for since the last time."""
        self._known = {key: known for key, known in self._known.items() if key in self._used}
        self._used.clear()


def propose(pools: Sequence[Pool], jobs: Sequence[JobDemand], *, known: KnownRates | None = None) -> Proposal:
    """Return the workers that each job should have.

    Admission goes by weight, then running before waiting, then arrival. Beyond minimums, workers go where they add most
    to the sum of the logarithms of what the jobs' objectives count. What a job has counts without, anything else with
    the cost of getting there: its pause over the time that the new workers are expected to last, and a margin. So a
    change that does not pay is not proposed, and proposing again after a proposal was carried out changes nothing.

    Args:
        pools: each name once.
        jobs: each key once; the grants come in their order.
        known: kept by a caller that proposes again and again.
    """
    by_name = {pool.name: pool for pool in pools}
    known = KnownRates() if known is None else known
    candidates = tables(pools, jobs, known=known)
    choice = exact(candidates, pools) if len(jobs) <= EXACT_JOBS else None
    certain = choice is not None
    if choice is None:
        choice = _settled(candidates, pools, by_name, known)
    room = Room(pools)
    grants = {
        candidate.job.key: _grant(candidate, option, by_name, room)
        for candidate, option in zip(candidates, choice, strict=True)
    }
    return Proposal(
        grants=tuple(grants[job.key] for job in jobs),
        exact=certain,
        reason=f"{sum(option is not None for option in choice)} of {len(jobs)} jobs run; "
        + ("no allocation is better" if certain else "searched, because there are too many combinations to try all"),
    )


def tables(pools: Sequence[Pool], jobs: Sequence[JobDemand], *, known: KnownRates | None = None) -> list[Candidate]:
    """Return every job with its options, in the order of admission."""
    by_name, room = {pool.name: pool for pool in pools}, Room(pools)
    ordered = sorted(jobs, key=lambda job: (-job.weight, not any(job.current.values()), job.arrived_s, job.key))
    rates_of = KnownRates() if known is None else known
    return [_candidate(job, by_name, room, rates_of) for job in ordered]


def _candidate(job: JobDemand, pools: Mapping[str, Pool], room: Room, known: KnownRates) -> Candidate:
    counts_OP, rate_O = known.of(job, room)
    return Candidate(job, options(job, pools, counts_OP=counts_OP, rate_O=rate_O))


def _settled(
    candidates: Sequence[Candidate],
    pools: Sequence[Pool],
    by_name: Mapping[str, Pool],
    known: KnownRates,
) -> Choice:
    """Return a choice that the search would choose again once it is carried out."""
    choice, room = searched(candidates, pools), Room(pools)
    then = list(candidates)
    for _ in range(_SETTLING):
        before, then = then, [_carried_out(c, o, by_name, room, known) for c, o in zip(then, choice, strict=True)]
        if all(a is b for a, b in zip(before, then, strict=True)):
            break  # everybody has it already
        again = searched(then, pools)
        same = [_counts(a) == _counts(b) for a, b in zip(again, choice, strict=True)]
        if all(same):
            break
        choice = tuple(
            None if option is None else candidate.by_counts[option.counts]
            for option, candidate in zip(again, candidates, strict=True)
        )
    return choice


def _carried_out(
    candidate: Candidate, option: Option | None, pools: Mapping[str, Pool], room: Room, known: KnownRates
) -> Candidate:
    """Return the job as it stands when it has this option."""
    workers = _workers(candidate.job, option)
    if workers == {key: count for key, count in candidate.job.current.items() if count}:
        return candidate
    return _candidate(replace(candidate.job, current=workers), pools, room, known)


def _counts(option: Option | None) -> tuple[int, ...] | None:
    return None if option is None else option.counts


def _workers(job: JobDemand, option: Option | None) -> dict[str, int]:
    if option is None:
        return {}
    return {offer.key: count for offer, count in zip(job.offers, option.counts, strict=True) if count}


def _grant(candidate: Candidate, option: Option | None, by_name: Mapping[str, Pool], room: Room) -> Grant:
    job = candidate.job
    now = {pool: count for pool, count in job.current.items() if count}
    workers = _workers(job, option)
    return Grant(
        key=job.key,
        workers=workers,
        rate_per_s=option.rate_per_s if option else 0.0,
        price_per_hour=option.price_per_hour if option else 0.0,
        spare_s=_spare_s(job, option),
        in_time=option is not None and option.in_time,
        changed=workers != now,
        reason=_why_not(candidate, by_name, room) if option is None else _why(candidate, option, now, workers),
    )


def _spare_s(job: JobDemand, option: Option | None) -> float | None:
    if option is None or option.needed_s is None or job.deadline_s is None:
        return None
    return job.deadline_s - option.needed_s


def _why_not(candidate: Candidate, by_name: Mapping[str, Pool], room: Room) -> str:
    job = candidate.job
    places = [room.places(offer.pool, offer.size) for offer in job.offers]
    held: dict[str, int] = {}
    for place, offer in zip(places, job.offers, strict=True):
        held[offer.label] = min(held.get(offer.label, 0) + place, offer.max_workers)
    for offer in job.offers:
        if offer.required and held[offer.label] < offer.min_workers:
            return f"waits: it needs {_workers_in_words(offer.min_workers)} in {offer.label}, which holds {held[offer.label]}"
    reachable = min(sum(held.values()), job.max_workers)
    if reachable < max(1, job.min_workers):
        dry = [
            offer.label
            for place, offer in zip(places, job.offers, strict=True)
            if place < offer.max_workers and offer.pool in by_name and by_name[offer.pool].out_of_stock
        ]
        why = f"; {', '.join(dry)} out of stock" if dry else ""
        return f"waits: it needs {_workers_in_words(job.min_workers)} and its pools hold {reachable}{why}"
    if not candidate.options:
        return (
            f"waits: no allowed number of workers can share a batch of {job.batch_samples} samples within their limits"
        )
    if job.min_workers <= 1:
        return "waits: jobs before it leave no room"
    return f"waits: jobs before it leave less than its {job.min_workers} workers"


def _workers_in_words(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def _why(candidate: Candidate, option: Option, now: Mapping[str, int], workers: Mapping[str, int]) -> str:
    job = candidate.job
    have, get = _by_label(job, now), _by_label(job, workers)
    what = " + ".join(f"{count} {pool}" for pool, count in get.items())
    measured = any(offer.member is not None for offer in job.offers)
    late = ""
    if option.needed_s is not None:
        late = ", in time for its deadline" if option.in_time else ", too late for its deadline"
    speed = f"{option.rate_per_s:.4g} samples/s{late}" if measured else f"speeds are not known yet{late}"
    if not now:
        return f"starts with {what}: {speed}"
    before = candidate.by_counts.get(tuple(now.get(offer.key, 0) for offer in job.offers))
    if workers == dict(now):
        best = candidate.options[0]
        if best is option:
            return f"stays with {what}: nothing that pays for its change is better ({speed})"
        return f"stays with {what}: other jobs need what would make it faster ({speed})"
    moves = ", ".join(
        f"{get.get(pool, 0) - have.get(pool, 0):+d} {pool}"
        for pool in sorted({*get, *have})
        if get.get(pool, 0) != have.get(pool, 0)
    )
    moves = moves or "the same numbers on other nodes"
    gives = f"; {what} give {speed}" if measured else f"; {speed}"
    if before is None:
        return f"{moves}: what it has is no longer possible{gives}"
    gain = option.rate_per_s / before.rate_per_s - 1
    if option.score < before.score:
        return f"{moves}: other jobs need them more{gives}"
    pays = f", pays for a pause of {job.pause_s:.3g} s in {job.pause_s * (1 + 1 / gain):.3g} s" if gain > 0 else ""
    price = ""
    if option.price_per_hour != before.price_per_hour:
        price = f", {option.price_per_hour:.4g} instead of {before.price_per_hour:.4g} an hour"
    return f"{moves}: {gain:+.1%} speed{pays}{price}{gives}"


def _by_label(job: JobDemand, workers: Mapping[str, int]) -> dict[str, int]:
    """Return the workers by the job's own names of its pools, in the order of its offers."""
    label_of = {offer.key: offer.label for offer in job.offers}
    found: dict[str, int] = {}
    for pool in [*label_of, *(pool for pool in workers if pool not in label_of)]:
        if workers.get(pool, 0):
            label = label_of.get(pool, pool)
            found[label] = found.get(label, 0) + workers[pool]
    return found
