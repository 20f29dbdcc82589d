"""The forecast of a job: its preferred allocation, and the faster or cheaper alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from heterotrain_core.contract.plan import Binding, CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Infeasible, Split, balance, evaluate, evenly
from heterotrain_core.split.member import SplitMember, TableTime
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange
from heterotrain_planner.split.expected import ExpectedSplit, balance_expected, expected_step_s

from heterotrain_cli.forecast.batch import with_name
from heterotrain_cli.forecast.bound import best_possible
from heterotrain_cli.forecast.candidates import candidate_allocations, climb
from heterotrain_cli.forecast.job import (
    Allocation,
    JobInput,
    PoolInput,
    preferred_allocation,
    price_per_hour,
    ranks_of,
)
from heterotrain_cli.profile import EXCHANGES_OF_A_PROFILE

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
        speed_gain: how much faster than the fastest alternative any allocation could be at most: 0.003 for 0.3 %; 0
            where none is faster, infinite without alternatives.
        cost_gain: how much more samples for the same price than the cheapest one any allocation could give at most;
            ``None`` where prices are missing.
    """

    feasible: bool
    reason: str
    preferred: AllocationForecast | None = None
    alternatives: tuple[AllocationForecast, ...] = ()
    compared: int = 0
    complete: bool = True
    speed_gain: float = math.inf
    cost_gain: float | None = None


def forecast_job(job: JobInput, exchange: MeasuredExchange) -> JobForecast:
    """Return the forecast with the shares of the operator.

    Args:
        job: with the known speeds.
        exchange: as measured; with 0 members, among those of the preferred allocation.
    """
    allocation = preferred_allocation(job)
    if isinstance(allocation, str):
        return JobForecast(feasible=False, reason=allocation)
    if not exchange.members:
        ranks, across = len(ranks_of(job, allocation)), sum(allocation) > 1
        exchange = exchange.measured_among(ranks, across=across, steps=EXCHANGES_OF_A_PROFILE)
    first = forecast_allocation(job, allocation, exchange)
    candidates, complete = candidate_allocations(job)
    found = {other: forecast_allocation(job, other, exchange, aware=False) for other in candidates}
    if not complete:
        found.setdefault(allocation, forecast_allocation(job, allocation, exchange, aware=False))
        _climb(job, exchange, found)
    front = _front(job, exchange, found.values())
    speed_gain, cost_gain = _most_gains(job, exchange, front, exact=complete and _alike(job))
    return JobForecast(
        feasible=not isinstance(first, Infeasible),
        reason=first.reason,
        preferred=None if isinstance(first, Infeasible) else first,
        alternatives=front,
        compared=len(found),
        complete=complete,
        speed_gain=speed_gain,
        cost_gain=cost_gain,
    )


def _climb(job: JobInput, exchange: MeasuredExchange, found: dict[Allocation, AllocationForecast | Infeasible]) -> None:
    """Add the allocations on the way from the fastest one and from the cheapest one to better neighbours."""

    def loss_of(workers: Allocation, loss: Callable[[AllocationForecast], float]) -> float:
        if workers not in found:
            found[workers] = forecast_allocation(job, workers, exchange, aware=False)
        outcome = found[workers]
        return loss(outcome) if isinstance(outcome, AllocationForecast) else math.inf

    for loss in (_slowness, _cost):
        if known := [other for other in found.values() if isinstance(other, AllocationForecast)]:
            climb(job, min(known, key=loss).allocation, partial(loss_of, loss=loss))


def _alike(job: JobInput) -> bool:
    """Return whether the operator's shares are the balanced or the even ones, so that all forecasts are final."""
    return job.even or len({pool.variation or 0.0 for pool in job.pools}) == 1


def _front(
    job: JobInput, exchange: MeasuredExchange, found: Iterable[AllocationForecast | Infeasible]
) -> tuple[AllocationForecast, ...]:
    """Return the Pareto front of forecasts with balanced shares.

    Where variations differ, candidates are compared with balanced shares, because shares that take noise into account
    take far longer to find. Those of the front then get them, unless that would take too long.
    """
    front = pareto_front([other for other in found if isinstance(other, AllocationForecast)])
    if _alike(job) or sum(len(ranks_of(job, other.allocation)) for other in front) > MOST_AWARE_RANKS:
        return front
    again = [forecast_allocation(job, other.allocation, exchange) for other in front]
    return pareto_front([other for other in again if isinstance(other, AllocationForecast)])


def _most_gains(
    job: JobInput, exchange: MeasuredExchange, front: Sequence[AllocationForecast], *, exact: bool
) -> tuple[float, float | None]:
    """Return by how much any allocation could be faster than the front's fastest, and cheaper than its cheapest."""
    if not front:
        return math.inf, None
    rate = front[0].samples_per_s
    priced = all(pool.price_per_hour is not None for pool in job.pools if pool.rank is not None)
    cost = min(map(_cost, front)) if priced else None
    if exact:
        return 0.0, 0.0 if priced else None
    best = best_possible(job, exchange)
    speed_gain = max(0.0, best.samples_per_s / rate - 1.0)
    if cost is None or cost <= 0:
        return speed_gain, cost
    return speed_gain, max(0.0, cost / best.cost_per_million - 1.0) if best.cost_per_million > 0 else math.inf


def forecast_allocation(
    job: JobInput, allocation: Allocation, exchange: MeasuredExchange, *, aware: bool = True
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
    communication = exchange.among(len(members), across=sum(allocation) > 1)
    even: Split | Infeasible = Infeasible(reason="no rank")
    if members:
        even = evaluate(evenly(job.batch_samples, len(members)), members, communication=communication)
    split = _split(job, members, variations, communication, aware=aware)
    if isinstance(split, Infeasible):
        return replace(split, reason=with_name(split.reason, [job.pools[index].name for index, _ in ranks]))
    per_hour = price_per_hour(job, allocation)
    step_s = expected_step_s(split, variations, hiccups=job.hiccups)
    rate = job.batch_samples / step_s
    return AllocationForecast(
        allocation=allocation,
        step_s=step_s,
        quiet_step_s=split.step_s,
        samples_per_s=rate,
        efficiency=rate / split.solo_samples_per_s,
        even_step_s=expected_step_s(even, variations, hiccups=job.hiccups) if isinstance(even, Split) else None,
        price_per_hour=per_hour,
        cost_per_million=None if per_hour is None else per_hour * 1e6 / rate / _HOUR_S,
        pools=tuple(
            _pool(pool, workers, [i for i, (owner, _) in enumerate(ranks) if owner == index], split, job.batch_samples)
            for index, (pool, workers) in enumerate(zip(job.pools, allocation, strict=True))
            if workers
        ),
        reason="even shares, because rebalance.boundary is Never" if job.even else split.reason,
    )


def _split(
    job: JobInput,
    members: Sequence[SplitMember],
    variations: Sequence[float],
    communication: CommunicationTime,
    *,
    aware: bool,
) -> Split | Infeasible:
    """Return the shares as the operator would choose them; balanced ones unless ``aware``."""
    if not job.even and aware and members:
        found = balance_expected(
            job.batch_samples, members, variations, communication=communication, hiccups=job.hiccups
        )
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


def _pool(pool: PoolInput, workers: int, own: Sequence[int], split: Split, batch_samples: int) -> PoolForecast:
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


def _slowness(outcome: AllocationForecast) -> float:
    return -outcome.samples_per_s


def _cost(outcome: AllocationForecast) -> float:
    return float("inf") if outcome.cost_per_million is None else outcome.cost_per_million
