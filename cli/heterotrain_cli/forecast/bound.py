"""Bounds how fast and how cheap any allocation of a job could be: no allocation and no shares exceed it.

Where all allocations can be listed, each one gets a lower bound of its step time. Let ``L`` be the mean step with
noise. No member's mean time exceeds it, and neither does the mean of the latest of one pool's members. Let these be
``n`` equal members with shares of mean ``b``, and ``e_n`` the mean of the largest of ``n`` standard normal numbers. The
latest of them is no earlier than the one with the largest noise, which is each of them equally often. So for convex
``C``

    L  >=  T_u + max(0, T_o - (1 - gamma) P(b)) + (1 + v e_n) C(b)

Accumulation is not convex, so it is replaced by convex curves below it. The least ``L`` at which the members take the
whole batch is found by bisection; granularity is left out. Where there are too many allocations to list, no bound is
stated.

Legend: ``O`` allocations, ``P`` pools of known speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_core.split.member import TableTime
from heterotrain_core.split.step_time import Timing
from heterotrain_planner.allocate.problem import JobDemand, JobPool
from heterotrain_planner.allocate.thinning import combine
from heterotrain_planner.allocate.value import MOST_VALUES, Floats, Ints, limits
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange
from heterotrain_planner.perf.expected_maximum import balanced_ceiling

from heterotrain_cli.forecast.job import JobInput, PoolInput

_HOUR_S = 3600.0
_MOST_COUNTED = 16_384
"""Allocations up to which each one gets a bound."""
_PRECISION = 1e-6
"""Relative width of the bracket of a step time at which the bisection ends; its lower end counts."""
_MOST_HALVINGS = 60
_MOST_MEMBERS = 1000
"""Members of a pool beyond which the noise of so many is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPossible:
    """What no allocation of a job exceeds, with any shares.

    Attributes:
        samples_per_s: at most this rate; infinite where no bound is known.
        cost_per_million: at least this price of a million samples; 0 where no bound is known, or a price is missing.
    """

    samples_per_s: float
    cost_per_million: float


def best_possible(job: JobInput, exchange: MeasuredExchange) -> BestPossible:
    """Return the bound of all allocations that the job allows, of the pools with known speeds.

    Args:
        job: with the known speeds, variations and prices.
        exchange: as measured.
    """
    pools = [pool for pool in job.pools if pool.rank is not None and pool.most_workers > 0]
    demand = _demand(job, pools, exchange)
    slots = [pool.most_workers for pool in pools]
    axes, together = limits(demand, slots)
    rows_OP = combine(axes, together, min(_MOST_COUNTED, MOST_VALUES // max(1, len(pools))))
    priced = all(pool.price_per_hour is not None for pool in pools)
    if rows_OP is None:
        return BestPossible(samples_per_s=math.inf, cost_per_million=0.0)
    step_O = _least_steps(job, pools, exchange, rows_OP)
    least_s = float(step_O.min(initial=math.inf))
    rate = job.batch_samples / least_s if least_s > 0 else math.inf
    cost = 0.0
    if priced:
        able_O = np.isfinite(step_O)
        price_O = rows_OP[able_O] @ np.array([pool.price_per_hour or 0.0 for pool in pools])
        cost = float((price_O * step_O[able_O]).min(initial=math.inf))
        cost *= 1e6 / _HOUR_S / job.batch_samples
    return BestPossible(samples_per_s=rate, cost_per_million=cost if math.isfinite(cost) else 0.0)


def _demand(job: JobInput, pools: list[PoolInput], exchange: MeasuredExchange) -> JobDemand:
    """Return the job as the allocation takes it, without noise, losses or the price of a change."""
    return JobDemand(
        key=job.name,
        pools=tuple(
            JobPool(
                pool=pool.name,
                min_workers=pool.least_workers,
                required=True,
                max_workers=pool.most_workers,
                ranks=pool.ranks,
                price_per_hour=pool.price_per_hour or 0.0,
                member=pool.rank,
            )
            for pool in pools
        ),
        min_workers=job.least_workers,
        max_workers=job.most_workers,
        batch_samples=job.batch_samples,
        communication=exchange.communication,
        communication_members=exchange.members,
        exchange_seen=exchange.seen,
        pause_s=0.0,
    )


def _least_steps(job: JobInput, pools: list[PoolInput], exchange: MeasuredExchange, rows_OP: Ints) -> Floats:
    """Return at most the least mean step of each allocation, ``_O``; infinite where it cannot take the batch."""
    members = [pool.rank for pool in pools if pool.rank is not None]  # all of them
    counts_OP: Floats = (rows_OP * np.array([pool.ranks for pool in pools])).astype(float)
    present_OP = counts_OP > 0
    scale_O = exchange.scale(counts_OP.sum(axis=1).astype(np.int64), rows_OP.sum(axis=1) > 1)
    timing = Timing(members, exchange.communication, job.batch_samples, exchange_L1=scale_O[:, None])
    noise_OP = np.stack([_noise(pool, job.hiccups, counts_OP[:, p]) for p, pool in enumerate(pools)], axis=1)
    batch = float(job.batch_samples)
    usable_O = (~present_OP | (timing.lo_W <= timing.hi_W)).all(axis=1)
    possible_O = usable_O & (counts_OP @ timing.lo_W <= batch) & (batch <= counts_OP @ timing.hi_W)
    shape = counts_OP.shape
    low_O = np.where(present_OP, timing.step_s(np.broadcast_to(timing.lo_W, shape)), 0.0).max(axis=1, initial=0.0)
    high_O = np.where(present_OP, timing.step_s(np.broadcast_to(timing.hi_W, shape)), 0.0).max(axis=1, initial=0.0)
    high_O = np.maximum(low_O, high_O * (1.0 + noise_OP.max(axis=1, initial=0.0)))
    for _ in range(_MOST_HALVINGS):
        if bool((high_O - low_O <= _PRECISION * low_O).all()):
            break
        middle_O = (low_O + high_O) / 2
        most_OP = timing.real_most(middle_O[:, None])[0]
        for p in range(len(pools)):
            if noise_OP[:, p].any():
                most_OP[:, p] = np.minimum(most_OP[:, p], _noisy_most(timing, p, middle_O, noise_OP[:, p]))
        # A level at which too little is done is below the step, whatever the rounding.
        few_O = (counts_OP * np.maximum(most_OP, timing.lo_W)).sum(axis=1) < batch * (1 - 1e-9)
        low_O, high_O = np.where(few_O, middle_O, low_O), np.where(few_O, high_O, middle_O)
    return np.where(possible_O, low_O, math.inf)


def _noise(pool: PoolInput, hiccups: Hiccups, members_O: Floats) -> Floats:
    """Return by how much the latest of so many members of a pool is later than their mean, relative to compute.

    Pauses of fixed length are left out, so it is at least as late.
    """
    variation = pool.variation or 0.0
    scaling = replace(hiccups, pause_s=0.0)
    if max(variation, scaling.variance(1.0)) <= 0 or (
        pool.rank is not None and isinstance(pool.rank.compute, TableTime)
    ):
        return np.zeros(len(members_O))
    whole_O = np.minimum(members_O, _MOST_MEMBERS).astype(np.int64)
    known = {n: 1.0 / balanced_ceiling([variation] * n, scaling) - 1.0 if n > 1 else 0.0 for n in set(whole_O.tolist())}
    return np.array([known[n] for n in whole_O.tolist()])


def _noisy_most(timing: Timing, column: int, level_O: Floats, noise_O: Floats) -> Floats:
    """Return the most samples that each of a pool's members takes on average while the latest ends within a level.

    Args:
        timing: of all pools.
        column: of this one, which has a time model.
        level_O: seconds.
        noise_O: from ``_noise``.
    """
    slope, fixed = float(timing.rate_W[column]), float(timing.fixed_W[column])
    largest = float(min(timing.micro_W[column], max(1, timing.hi_W[column])))
    curves = [(slope + fixed / largest, 0.0)]  # fixed seconds once for each full micro-batch: below any share's time
    if timing.lo_W[column] > 0:
        curves.append((slope, fixed))  # at least one micro-batch
    last_O, overlapped_O = (np.broadcast_to(x, (len(level_O), 1))[:, 0] for x in (timing.last_s, timing.overlapped_s))
    hidden = timing.hidden
    most_O = np.full(len(level_O), math.inf)
    for rate, once in curves:
        left_O = level_O - last_O - (1.0 + noise_O) * (once + float(timing.update_W[column]))
        exposed_O = left_O - overlapped_O + hidden * float(timing.m_W[column])
        for budget_O, net_O in (
            (left_O, (1.0 + noise_O) * rate),
            (exposed_O, (1.0 + noise_O) * rate - hidden * float(timing.k_W[column])),
        ):
            with np.errstate(divide="ignore", invalid="ignore"):
                found_O = np.where(net_O > 0, budget_O / net_O, np.where(budget_O >= 0, math.inf, 0.0))
            most_O = np.minimum(most_O, found_O)
    at_least_none_O: Floats = np.maximum(most_O, 0.0)
    return at_least_none_O
