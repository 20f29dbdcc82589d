"""The forecast of a job: its preferred allocation, and the faster or cheaper alternatives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import Binding, CommunicationTime, ComputeTime
from heterotrain_core.perf.exchange_sizes import MeasuredExchange
from heterotrain_core.split.balance import Infeasible, Split, balance, evaluate, evenly
from heterotrain_core.split.expected import ExpectedSplit, balance_expected, expected_step_s
from heterotrain_core.split.member import SplitMember, TableTime

from heterotrain_cli.forecast.batch import with_name
from heterotrain_cli.forecast.job import (
    Allocation,
    Job,
    Pool,
    preferred_allocation,
    price_per_hour,
    ranks_of,
)
from heterotrain_cli.profile import EXCHANGES_OF_A_PROFILE

MAX_CANDIDATES = 2000
"""Most allocations to compare; beyond it, fewer counts of each pool are tried."""
MOST_AWARE_RANKS = 4096
"""Ranks of all alternatives together up to which their shares take noise into account; each takes milliseconds."""
_HOUR_S = 3600.0
_EQUAL_SPEED = ComputeTime(per_sample_s=1.0, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolForecast:
    """The part of one pool in a step.

    Attributes:
        name: the pool.
        workers, ranks: their numbers in this pool.
        samples: smallest and largest share of a rank.
        micro_batches: largest number of micro-batches of a rank.
        part: the pool's part of the global batch.
        variation: of a rank's own time of a step; ``None`` where its noise is left out.
        bindings: binding limits of its ranks, the most frequent first.
        price_per_hour: of all its workers, ``None`` if unknown.
    """

    name: str
    workers: int
    ranks: int
    samples: tuple[int, int]
    micro_batches: int
    part: float
    variation: float | None
    bindings: tuple[tuple[Binding, int], ...]
    price_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationForecast:
    """The forecast of one allocation.

    Attributes:
        allocation: workers of each pool.
        step_s: mean seconds of a step, with the noise of all ranks whose variation is known.
        quiet_step_s: the same with the same shares and without noise.
        samples_per_s: batch / ``step_s``.
        efficiency: ``samples_per_s`` over the sum of solo rates.
        even_step_s: mean seconds of a step with even shares, noise included; ``None`` if they do not fit.
        price_per_hour: of all workers, ``None`` if a price is missing.
        cost_per_million: price of a million samples, ``None`` likewise.
        pools: those with workers, in the job's order.
        reason: one sentence.
    """

    allocation: Allocation
    step_s: float
    quiet_step_s: float
    samples_per_s: float
    efficiency: float
    even_step_s: float | None
    price_per_hour: float | None
    cost_per_million: float | None
    pools: tuple[PoolForecast, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForecast:
    """The forecast of a job.

    Attributes:
        feasible: whether the preferred allocation can take the batch.
        reason: one sentence.
        preferred: of the preferred allocation; ``None`` if not feasible.
        alternatives: the Pareto front of speed and price, the fastest first; by speed alone where prices are missing.
            The preferred allocation is among them only if no other one beats it.
        compared: number of allocations that were compared for these.
        complete: whether those are all that the job allows, of the pools with known speeds.
    """

    feasible: bool
    reason: str
    preferred: AllocationForecast | None = None
    alternatives: tuple[AllocationForecast, ...] = ()
    compared: int = 0
    complete: bool = True


def forecast_job(job: Job, exchange: MeasuredExchange) -> JobForecast:
    """Return the forecast with the shares of the operator.

    Args:
        job: with the known speeds.
        exchange: as measured; with 0 members, among those of the preferred allocation.
    """
    allocation = preferred_allocation(job)
    if isinstance(allocation, str):
        return JobForecast(feasible=False, reason=allocation)
    if not exchange.members:
        ranks, across = len(ranks_of(job, allocation)), sum(allocation.workers) > 1
        exchange = exchange.measured_among(ranks, across=across, steps=EXCHANGES_OF_A_PROFILE)
    first = forecast_allocation(job, allocation, exchange)
    candidates, complete = _candidates(job)
    return JobForecast(
        feasible=not isinstance(first, Infeasible),
        reason=first.reason,
        preferred=None if isinstance(first, Infeasible) else first,
        alternatives=_alternatives(job, candidates, exchange),
        compared=len(candidates),
        complete=complete,
    )


def _alternatives(
    job: Job, candidates: Sequence[Allocation], exchange: MeasuredExchange
) -> tuple[AllocationForecast, ...]:
    """Return the Pareto front of the candidates.

    Where variations differ, candidates are compared with balanced shares, because shares that take noise into account
    take far longer to find. Those of the front then get them, unless that would take too long.
    """
    found = [forecast_allocation(job, other, exchange, aware=False) for other in candidates]
    front = pareto_front([other for other in found if isinstance(other, AllocationForecast)])
    ranks = sum(len(ranks_of(job, other.allocation)) for other in front)
    if job.even or len({pool.variation or 0.0 for pool in job.pools}) == 1 or ranks > MOST_AWARE_RANKS:
        return front
    again = [forecast_allocation(job, other.allocation, exchange) for other in front]
    return pareto_front([other for other in again if isinstance(other, AllocationForecast)])


def forecast_allocation(
    job: Job, allocation: Allocation, exchange: MeasuredExchange, *, aware: bool = True
) -> AllocationForecast | Infeasible:
    """Return the forecast of an allocation with the job's batch.

    Args:
        job: with the known speeds and variations.
        allocation: workers of each pool.
        exchange: as measured.
        aware: whether shares are those of the least expected step, as the operator's; otherwise they are balanced.
    """
    ranks = ranks_of(job, allocation)
    members = [member for _, member in ranks]
    variations = [job.pools[index].variation or 0.0 for index, _ in ranks]
    communication = exchange.among(len(members), across=sum(allocation.workers) > 1)
    even: Split | Infeasible = Infeasible(reason="no rank")
    if members:
        even = evaluate(evenly(job.batch_samples, len(members)), members, communication=communication)
    split = _split(job, members, variations, communication, aware=aware)
    if isinstance(split, Infeasible):
        return replace(split, reason=with_name(split.reason, [job.pools[index].name for index, _ in ranks]))
    per_hour = price_per_hour(job, allocation)
    step_s = expected_step_s(split, variations)
    rate = job.batch_samples / step_s
    return AllocationForecast(
        allocation=allocation,
        step_s=step_s,
        quiet_step_s=split.step_s,
        samples_per_s=rate,
        efficiency=rate / split.solo_samples_per_s,
        even_step_s=expected_step_s(even, variations) if isinstance(even, Split) else None,
        price_per_hour=per_hour,
        cost_per_million=None if per_hour is None else per_hour * 1e6 / rate / _HOUR_S,
        pools=tuple(
            _pool(pool, workers, [i for i, (owner, _) in enumerate(ranks) if owner == index], split, job.batch_samples)
            for index, (pool, workers) in enumerate(zip(job.pools, allocation.workers, strict=True))
            if workers
        ),
        reason="even shares, because rebalance.boundary is Never" if job.even else split.reason,
    )


def _split(
    job: Job,
    members: Sequence[SplitMember],
    variations: Sequence[float],
    communication: CommunicationTime,
    *,
    aware: bool,
) -> Split | Infeasible:
    """Return the shares as the operator would choose them; balanced ones unless ``aware``."""
    if not job.even and aware and members:
        found = balance_expected(job.batch_samples, members, variations, communication=communication)
        return found.split if isinstance(found, ExpectedSplit) else found
    split = balance(job.batch_samples, members, communication=communication)
    if isinstance(split, Infeasible) or not job.even:
        return split
    # As in the operator: evenly, within the limits.
    alike = balance(job.batch_samples, [_equal_speed(member) for member in members])
    return alike if isinstance(alike, Infeasible) else evaluate(alike.shares, members, communication=communication)


def _equal_speed(member: SplitMember) -> SplitMember:
    """Return the member with its limits, the end of a table included, and the same time as all others."""
    compute = member.compute
    if not isinstance(compute, TableTime):
        return replace(member, compute=_EQUAL_SPEED)
    last = compute.points[-1][0]
    cap = last if member.cap_samples is None else min(last, member.cap_samples)
    return replace(member, compute=_EQUAL_SPEED, cap_samples=cap)


def _pool(pool: Pool, workers: int, own: Sequence[int], split: Split, batch_samples: int) -> PoolForecast:
    shares = [split.shares[i] for i in own]
    bindings = [split.bindings[i] for i in own]
    counts = {binding: bindings.count(binding) for binding in sorted(set(bindings))}
    return PoolForecast(
        name=pool.name,
        workers=workers,
        ranks=len(own),
        samples=(min(shares), max(shares)),
        micro_batches=max(split.micro_batches[i] for i in own),
        part=sum(shares) / batch_samples,
        variation=pool.variation,
        bindings=tuple(sorted(counts.items(), key=lambda item: -item[1])),
        price_per_hour=None if pool.price_per_hour is None else pool.price_per_hour * workers,
    )


def pareto_front(outcomes: Sequence[AllocationForecast]) -> tuple[AllocationForecast, ...]:
    """Return the Pareto front of samples per second and cost per sample, fastest first.

    Of equal forecasts the first stays. A forecast without a price can only win by speed.
    """
    kept: list[AllocationForecast] = []
    cheapest = float("inf")
    for outcome in sorted(outcomes, key=lambda o: (-o.samples_per_s, _cost(o))):
        if not kept or _cost(outcome) < cheapest * (1 - 1e-9):
            kept.append(outcome)
            cheapest = min(cheapest, _cost(outcome))
    return tuple(kept)


def _cost(outcome: AllocationForecast) -> float:
    return float("inf") if outcome.cost_per_million is None else outcome.cost_per_million


def _candidates(job: Job) -> tuple[list[Allocation], bool]:
    """Return the allocations to compare: all that the job allows, or fewer counts of each pool if they are too many.

    The second value says whether they are all.
    """
    limits = [_all_counts(pool) if pool.rank is not None else range(1) for pool in job.pools]
    found = list(itertools.islice(_allowed(limits, job.least_workers, job.most_workers), MAX_CANDIDATES + 1))
    complete = len(found) <= MAX_CANDIDATES
    if not complete:
        found = [counts for counts in _fewer(job) if job.least_workers <= sum(counts) <= job.most_workers]
    return [Allocation(workers=counts) for counts in found], complete


def _allowed(limits: Sequence[range], least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the counts within limits whose sum is between ``least`` and ``most``; no time is spent on others."""
    if not limits:
        if least <= 0 <= most:
            yield ()
        return
    fewest, largest = sum(own[0] for own in limits[1:]), sum(own[-1] for own in limits[1:])
    first = limits[0]
    for count in range(max(first[0], least - largest), min(first[-1], most - fewest) + 1):
        for rest in _allowed(limits[1:], least - count, most - count):
            yield (count, *rest)


def _fewer(job: Job) -> Iterator[tuple[int, ...]]:
    """Return fewer counts, whatever their sum."""
    ranges: list[list[int]] = []
    for wanted in (_halved_counts, _extreme_counts):
        ranges = [wanted(pool) if pool.rank is not None else [0] for pool in job.pools]
        if math.prod(map(len, ranges)) <= MAX_CANDIDATES:
            return itertools.product(*ranges)
    return _without_or_only_each_pool(ranges)


def _all_counts(pool: Pool) -> range:
    return range(pool.least_workers, pool.most_workers + 1)


def _halved_counts(pool: Pool) -> list[int]:
    halves = {pool.most_workers >> shift for shift in range(pool.most_workers.bit_length() + 1)}
    return sorted({pool.least_workers, *(n for n in halves if n > pool.least_workers)})


def _extreme_counts(pool: Pool) -> list[int]:
    return sorted({pool.least_workers, pool.most_workers})


def _without_or_only_each_pool(ranges: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    least, most = [values[0] for values in ranges], [values[-1] for values in ranges]
    yield tuple(most)
    for index in range(len(ranges)):
        yield (*most[:index], least[index], *most[index + 1 :])
        yield (*least[:index], most[index], *least[index + 1 :])
