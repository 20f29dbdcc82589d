"""The value of sets of workers to a job: their expected rates, less the cost of a change, for many sets at once.

Legend: ``O`` options (numbers of workers from each of the job's pools), ``P`` the job's pools, ``B`` candidate batches,
``C`` options times candidate batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from heterotrain_core.contract.choices import Objective
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.level import real_levels
from heterotrain_core.split.member import SplitMember, member_problem
from heterotrain_core.split.step_time import Timing
from numpy.typing import NDArray

from heterotrain_planner.allocate.deadline import in_time, needed_s
from heterotrain_planner.allocate.noise import noise_ceilings
from heterotrain_planner.allocate.problem import JobDemand, Pool
from heterotrain_planner.allocate.risk import losses_per_s
from heterotrain_planner.allocate.thinning import PoolLimit, combine, thin
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_GAIN = 0.03
"""Gain that a change has to promise beyond its pause: models are no more exact, and every change is a risk."""
LEAST_GAIN_UNMEASURED = 0.25
"""The same for a job whose speeds are about to be measured. Without them, a worker of each pool counts the same, and
pools differ by more than that: most changes that are made now would be undone after the first scrape."""
LONGEST_DWELL_S = 7 * 24 * 3600.0
"""Seconds that a set of workers is expected to last at most, however rare losses are: one week."""
BATCHES = 7
"""Candidate batches of an adaptive job in an allocation; the plan itself compares more."""
JUMPS = (-1, 0, 1)
"""Where members accumulate: full micro-batches more than in the best of these batches, at which to look as well."""
MOST_OPTIONS = 2048
"""Most options of one job; where there are more, the numbers of workers are thinned out."""
MOST_NEAR = 729
"""Most options close to a choice: three workers more or less in each of three pools, one in each of six."""
MOST_VALUES = 256 * 1024
"""Options times pools times candidate batches of a thinned job: bounds memory where a job has very many pools."""
_LEAST_OPTIONS = 32
"""Options that a thinned job keeps, however many pools and batches it has."""
IN_TIME = 20.0
"""Score of meeting the deadline: more than any difference in rate or price."""
_UNKNOWN = SplitMember(
    compute=ComputeTime(per_sample_s=1.0, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
)


class Option(NamedTuple):
    """One set of workers for a job; there may be millions of options.

    Attributes:
        counts: workers from each of the job's pools, in their order.
        rate_per_s: expected samples per second, weighted as the objective asks, losses included, before the cost of
            change.
        price_per_hour: of all workers.
        score: summand of the search: the logarithm of the objective's quantity, after the cost of change.
        in_time: whether it meets the deadline.
        needed_s: seconds until the work is done; ``None`` without a deadline, or while the remaining work is not known.
    """

    counts: tuple[int, ...]
    rate_per_s: float
    price_per_hour: float
    score: float
    in_time: bool = False
    needed_s: float | None = None

    @property
    def workers(self) -> int:
        """Workers over all pools."""
        return sum(self.counts)


_MAKE_OPTION: Callable[[tuple[object, ...]], Option] = partial(tuple.__new__, Option)


class Scores(NamedTuple):
    """Figures of the rows of numbers of workers, all ``_O``, as in ``Option``; ``needed_O`` only with a deadline."""

    rate_O: Floats
    price_O: Floats
    score_O: Floats
    in_time_O: NDArray[np.bool_]
    needed_O: Floats | None


def scored_options(job: JobDemand, pools: Mapping[str, Pool], *, counts_OP: Ints, rate_O: Floats) -> tuple[Option, ...]:
    """Return the options with which the job makes progress, with their scores, best first.

    Args:
        job: the demand.
        pools: by name.
        counts_OP: from ``possible_counts``.
        rate_O: from ``rates``.
    """
    if not len(counts_OP):
        return ()
    found = scores(job, pools, counts_OP=counts_OP, rate_O=rate_O)
    order = np.lexsort((*counts_OP.T[::-1], counts_OP.sum(axis=1), -found.score_O))
    order = order[found.rate_O[order] > 0]
    counts = map(tuple, counts_OP[order].tolist())
    columns = (each[order].tolist() for each in (found.rate_O, found.price_O, found.score_O, found.in_time_O))
    needs = [None] * len(order) if found.needed_O is None else found.needed_O[order].tolist()
    # There may be hundreds of thousands: as plain tuples of the class, they take half the time.
    return tuple(map(_MAKE_OPTION, zip(counts, *columns, needs, strict=True)))


def scores(job: JobDemand, pools: Mapping[str, Pool], *, counts_OP: Ints, rate_O: Floats) -> Scores:
    """Return the figures of each row, with a score of minus infinity where the job makes no progress."""
    loss_P = np.array([losses_per_s(pools[o.pool]) if o.pool in pools else 0.0 for o in job.pools])
    price_P = np.array([job_pool.price_per_hour for job_pool in job.pools])
    loss_O = counts_OP @ loss_P
    price_O = counts_OP @ price_P
    # Each loss costs the job one pause.
    rate_O = rate_O * np.maximum(0.0, 1.0 - loss_O * job.pause_s)
    effective_O = _after_pauses(job, counts_OP, rate_O, loss_O)
    in_time_O = np.zeros(len(rate_O), dtype=bool)
    needed_O: Floats | None = None
    with np.errstate(divide="ignore"):
        dear_O = price_O if price_P.any() else counts_OP.sum(axis=1) * 1.0
        score_O, dearness_O = np.log(effective_O), np.log(np.where(dear_O > 0, dear_O, 1.0))
    if job.objective is Objective.COST:
        score_O = score_O - dearness_O
    if timed(job):
        kept_O = (counts_OP == _current(job)).all(axis=1)
        needed_O = needed_s(job, rate_O=rate_O, loss_O=loss_O, workers_O=counts_OP.sum(axis=1), kept_O=kept_O)
        in_time_O = in_time(job, needed_O, kept_O=kept_O, dear_O=dear_O)
        # In time, the price of all workers counts. Too late, only speed counts.
        score_O = score_O + np.where(in_time_O, IN_TIME - dearness_O, 0.0)
    score_O = job.weight * job.exponent * score_O
    return Scores(rate_O, price_O, score_O, in_time_O, needed_O)


def timed(job: JobDemand) -> bool:
    """Return whether the job has a deadline and its remaining work is known."""
    return job.objective is Objective.DEADLINE and job.deadline_s is not None and job.remaining_samples is not None


def _current(job: JobDemand) -> Ints:
    """Return the job's current workers in each of its pools, ``_P``."""
    return _counts_of(job, job.current)


def _counts_of(job: JobDemand, workers: Mapping[str, int]) -> Ints:
    return np.array([workers.get(job_pool.key, 0) for job_pool in job.pools], dtype=np.int64)


def _after_pauses(job: JobDemand, counts_OP: Ints, rate_O: Floats, loss_O: Floats) -> Floats:
    """Return the rates less the cost of a change and a margin; the current workers cost nothing."""
    current = _current(job)
    if not current.any():
        granted = _counts_of(job, job.granted)
        if not (job.measured_soon and granted.any()):
            return rate_O
        # Its first workers are about to be created: jobs that are measured meanwhile should not trade with it.
        kept: Floats = np.where((counts_OP == granted).all(axis=1), rate_O, rate_O * (1.0 - LEAST_GAIN_UNMEASURED))
        return kept
    # The pause is spread over the time that the new workers are expected to last, or that the job still needs.
    lasting_O = np.minimum(1.0 / np.maximum(loss_O, 1.0 / LONGEST_DWELL_S), LONGEST_DWELL_S)
    if job.remaining_samples is not None:
        lasting_O = np.minimum(lasting_O, job.remaining_samples / np.maximum(rate_O, 1e-300) + job.pause_s)
    margin = LEAST_GAIN_UNMEASURED if job.measured_soon else LEAST_GAIN
    worth_O = np.maximum(1e-6, 1.0 - job.pause_s / np.maximum(lasting_O, 1e-9)) * (1.0 - margin)
    effective_O: Floats = np.where((counts_OP == current).all(axis=1), rate_O, rate_O * worth_O)
    return effective_O


def rates(job: JobDemand, counts_OP: Ints) -> Floats:
    """Return weighted samples per second for each option; 0 where the batch cannot be shared or the model not held.

    Weights are those of the objective. Shares are real-valued: whole samples matter little here, and the plan rounds.
    """
    members = known_members(job)
    ranks_P = np.array([job_pool.ranks for job_pool in job.pools])
    members_OP = counts_OP * ranks_P
    if job.layouts is not None:  # its batch is fixed
        return job.layouts.of([job_pool.label for job_pool in job.pools], members_OP)
    total_O = members_OP.sum(axis=1)
    batches = candidate_batches(job)
    worth = batch_worth(job, batches)
    counts_CP: Floats = np.repeat(members_OP, len(batches), axis=0).astype(float)
    batch_C = np.tile(np.array(batches, dtype=float), len(counts_OP))
    scale_O = exchange_scale(job, total_O, counts_OP.sum(axis=1))
    timing = Timing(members, job.communication, max(batches), exchange_L1=np.repeat(scale_O, len(batches))[:, None])
    floor_C, cap_C = counts_CP @ timing.lo_W, counts_CP @ timing.hi_W
    possible_C = (floor_C <= batch_C) & (batch_C <= cap_C)
    # Where the batch cannot be shared, a feasible one stands in; its result is discarded below.
    level_C = real_levels(timing, np.clip(batch_C, floor_C, cap_C), counts_CW=counts_CP)
    at_floor_CP = timing.step_s(np.broadcast_to(timing.lo_W, counts_CP.shape))
    step_C = np.maximum(level_C, np.where(counts_CP > 0, at_floor_CP, 0.0).max(axis=1))
    # With noise, the slowest of many members is slower than each of them on average.
    noise_C = _noise(job, timing, counts_CP, step_C)
    rate_C = np.where(possible_C & (step_C > 0), batch_C / np.maximum(step_C, 1e-300), 0.0) * noise_C
    rate_OB = rate_C.reshape(len(counts_OP), len(batches))
    every_O = np.arange(len(counts_OP))
    best_O = (rate_OB * worth).argmax(axis=1)
    plain_O, worth_O = rate_OB[every_O, best_O], worth[best_O]
    if len(batches) > 1 and timing.accumulates:
        timing = Timing(members, job.communication, max(batches), exchange_L1=scale_O[:, None])
        level_O = step_C.reshape(rate_OB.shape)[every_O, best_O]
        for batch_O, at_O in _before_jumps(timing, members_OP, level_O):
            able_O = (batches[0] <= batch_O) & (batch_O <= batches[-1]) & (plain_O > 0)
            there_O = np.where(able_O, batch_O / np.maximum(at_O, 1e-300), 0.0)
            there_O *= _noise(job, timing, members_OP.astype(float), at_O)
            its_O = batch_worth(job, np.clip(batch_O, batches[0], batches[-1]))
            better_O = there_O * its_O > plain_O * worth_O
            plain_O, worth_O = np.where(better_O, there_O, plain_O), np.where(better_O, its_O, worth_O)
    if job.objective is Objective.DEADLINE:
        # The remaining work is counted in plain samples, but the batch is chosen by their weighted value.
        worth_O = np.ones(len(worth_O))
    rate_O: Floats = plain_O * worth_O
    return rate_O


def _noise(job: JobDemand, timing: Timing, members_OP: Floats, level_O: Floats) -> Floats:
    """Return the efficiency that noise leaves to members which end together at a level, ``_O``.

    Args:
        job: the demand.
        timing: of one member of each pool, with the exchange of each option.
        members_OP: members of each pool.
        level_O: step time in seconds.
    """
    total_O = members_OP.sum(axis=1)
    whole_O = total_O.astype(np.int64)
    if job.hiccups.pause_s <= 0:
        return noise_ceilings(job.variation, whole_O, job.hiccups)
    share_OP = timing.real_most(level_O[:, None])[0]
    micro_OP = np.ceil(share_OP / timing.micro_W)
    own_OP = timing.rate_W * share_OP + timing.fixed_W * micro_OP + timing.update_W
    own_O = (members_OP * own_OP).sum(axis=1) / np.maximum(total_O, 1)
    return noise_ceilings(job.variation, whole_O, job.hiccups, own_O)


def _before_jumps(timing: Timing, members_OP: Ints, level_O: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Yield batches just before a further micro-batch of some pool's members, with their step times, both ``_O``.

    One more sample would cost the fixed part of that micro-batch, so goodput falls there. At the time of so many full
    micro-batches, the largest batch is the sum of what all members do until then.

    Args:
        timing: of one member of each pool, with the exchange of each option.
        members_OP: members of each pool.
        level_O: step time near which to look.
    """
    full_OP = np.floor(timing.real_most(level_O[:, None])[0] / timing.micro_W)
    floors_OP = timing.step_s(np.broadcast_to(timing.lo_W, members_OP.shape))
    floor_O = np.where(members_OP > 0, floors_OP, 0.0).max(axis=1)
    for further in JUMPS:
        samples_OP = np.clip((full_OP + further).astype(np.int64), 1, None) * timing.micro_W
        step_OP = timing.step_s(np.clip(samples_OP, timing.lo_W, timing.hi_W))
        for p in np.flatnonzero(timing.micro_W < timing.hi_W).tolist():
            at_O = np.maximum(step_OP[:, p], floor_O)
            most_OP = timing.real_most(at_O[:, None])[0]
            yield np.where(members_OP[:, p] > 0, (members_OP * most_OP).sum(axis=1), 0.0), at_O


def exchange_scale(job: JobDemand, members_O: Ints, workers_O: Ints) -> Floats:
    """Return the factor on the job's ``communication`` for so many members of so many workers."""
    measured = MeasuredExchange(
        communication=job.communication, members=job.communication_members, seen=job.exchange_seen
    )
    return measured.scale(members_O, workers_O > 1)


def possible_counts(job: JobDemand, slots: Sequence[int]) -> tuple[Ints, bool]:
    """Return numbers of workers from each of the job's pools that limits and slots allow, and whether all are listed.

    There are at most ``MOST_OPTIONS`` rows, whatever the number of pools. If limits leave more, the numbers of each
    pool are halved, down to the lowest, the highest and the current one. If there are still too many, ``thin`` selects
    rows.

    Args:
        job: the demand.
        slots: workers of the job's size that each of its pools holds when it is empty.
    """
    axes, together = limits(job, slots)
    all_OP = combine(axes, together, MOST_OPTIONS)
    if all_OP is not None:
        return all_OP, True
    current = [job.current.get(job_pool.key, 0) for job_pool in job.pools]
    while math.prod(len(axis) for axis in axes) > MOST_OPTIONS:
        widest = max(range(len(axes)), key=lambda i: (len(axes[i]), -i))
        axis = axes[widest]
        axes[widest] = sorted({axis[0], *axis[::2], axis[-1], *(n for n in axis if n == current[widest])})
        if len(axes[widest]) == len(axis):
            break
    most_rows = MOST_OPTIONS
    if math.prod(len(axis) for axis in axes) > MOST_OPTIONS:
        most_rows = max(_LEAST_OPTIONS, min(MOST_OPTIONS, MOST_VALUES // (len(axes) * len(candidate_batches(job)))))
    rows_OP = combine(axes, together, most_rows)
    if rows_OP is None:
        rows_OP = thin(axes, together, current=tuple(current), preferred=_preferred(job), most_rows=most_rows)
    return rows_OP, False


def counts_near(job: JobDemand, slots: Sequence[int], centre: Sequence[int]) -> Ints:
    """Return the numbers of workers close to ``centre`` that limits and slots allow, at most ``MOST_NEAR`` rows.

    Every pool may differ by as many workers as that number of rows allows. With many pools, only some of them may
    differ: those that have workers in ``centre``, then those preferred.

    Args:
        job: the demand.
        slots: workers of the job's size that each of its pools holds when it is empty.
        centre: workers from each of the job's pools.
    """
    axes, together = limits(job, slots)
    order = sorted(_preferred(job), key=lambda i: centre[i] == 0)
    most_free = int(math.log(MOST_NEAR, 3))
    free = set(order[:most_free])
    reach = 1
    while (2 * reach + 3) ** len(free) <= MOST_NEAR:
        reach += 1
    near = [
        [n for n in axis if abs(n - count) <= (reach if i in free else 0)]
        for i, (axis, count) in enumerate(zip(axes, centre, strict=True))
    ]
    rows_OP = combine(near, together, MOST_NEAR)
    return np.empty((0, len(axes)), dtype=np.int64) if rows_OP is None else rows_OP


def limits(job: JobDemand, slots: Sequence[int]) -> tuple[list[list[int]], list[PoolLimit]]:
    """Return all numbers of workers of each of the job's pools, and the limits of pools together."""
    highest = _highest(job, slots)
    labels = [job_pool.label for job_pool in job.pools]
    parts = {label: [i for i, each in enumerate(labels) if each == label] for label in labels}
    limits = {}
    for label, own in parts.items():
        first = job.pools[own[0]]
        reachable = sum(highest[i] for i in own)
        limits[label] = (first.min_workers if first.required else min(first.min_workers, reachable), first.max_workers)
    lowest = [limits[label][0] if len(parts[label]) == 1 else 0 for label in labels]
    axes = [list(range(low, high + 1)) for low, high in zip(lowest, highest, strict=True)]
    all_pools = PoolLimit(range(len(axes)), max(1, job.min_workers), job.max_workers)
    return axes, [all_pools, *(PoolLimit(own, *limits[label]) for label, own in parts.items() if len(own) > 1)]


def _preferred(job: JobDemand) -> list[int]:
    """Return the positions of the job's pools: the fastest one first, or where prices count, the cheapest samples."""
    by_price = job.objective in (Objective.COST, Objective.DEADLINE) and any(each.price_per_hour for each in job.pools)
    needed = [
        _seconds(member) / job_pool.ranks * (job_pool.price_per_hour if by_price else 1.0)
        for member, job_pool in zip(known_members(job), job.pools, strict=True)
    ]
    return sorted(range(len(needed)), key=lambda i: (needed[i], i))


def _highest(job: JobDemand, slots: Sequence[int]) -> list[int]:
    return [max(0, min(each.max_workers, count, job.max_workers)) for each, count in zip(job.pools, slots, strict=True)]


def thinned_out(job: JobDemand, slots: Sequence[int]) -> bool:
    """Return whether there may be too many options to list all, without listing them."""
    return math.prod(most + 1 for most in _highest(job, slots)) > MOST_OPTIONS


def known_members(job: JobDemand) -> list[SplitMember]:
    """Return one member for each of the job's pools; an unknown speed is taken from the known pool of middle speed."""
    known = [each.member for each in job.pools if each.member is not None and member_problem(each.member) is None]
    like = sorted(known, key=_seconds)[len(known) // 2] if known else _UNKNOWN
    return [each.member if each.member in known and each.member is not None else like for each in job.pools]


def _seconds(member: SplitMember) -> float:
    """Return seconds per sample, for comparison only."""
    compute = member.compute
    if isinstance(compute, ComputeTime):
        return compute.per_sample_s + compute.backward_per_sample_s
    samples, seconds = compute.points[-1]
    return seconds / max(1, samples)


def candidate_batches(job: JobDemand) -> tuple[int, ...]:
    """Return the candidate batches: only one for a fixed batch, or while the noise scale is unknown."""
    if job.largest_batch_samples is None or job.noise_samples is None:
        return (job.batch_samples,)
    ratio = max(1.0, job.largest_batch_samples / job.batch_samples)
    return tuple(sorted({round(job.batch_samples * ratio ** (i / (BATCHES - 1))) for i in range(BATCHES)}))


def batch_worth(job: JobDemand, batches: Sequence[float] | Floats) -> Floats:
    """Return the weight of a sample in each batch, ``_B``."""
    if job.noise_samples is None or job.objective is Objective.THROUGHPUT:
        return np.ones(len(batches))
    phi = max(0.0, job.noise_samples)
    found_B: Floats = (phi + job.batch_samples) / (phi + np.asarray(batches, dtype=float))  # as in ``goodput``
    return found_B
