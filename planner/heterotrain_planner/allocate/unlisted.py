"""The most that a job could gain from numbers of workers that are not among its listed options.

A job with many pools has more possible numbers of workers than can be listed. Where they can still be counted through,
they are. Otherwise the most is taken over step times instead: to finish a batch of ``B`` samples within a time ``T``,
workers that take ``b_p(T)`` samples each have to take ``B`` together, so they cost at least

    min Σ c_p n_p    with  Σ b_p(T) n_p ≥ B,  Σ n_p ≤ N,  0 ≤ n_p ≤ most_p

A linear programme with two rows: any price of the second row gives a lower bound, and the first one is filled by the
cheapest samples. Numbers of workers are grouped, because exchange and noise grow with them; each group takes its least.
Step times are cut into intervals: rate at the start, cost at the end. The bound is above every option, listed or not.

Legend: ``O`` numbers of workers, ``P`` the job's pools, ``L`` intervals of step times, ``B`` candidate batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from heterotrain_core.contract.choices import Objective
from heterotrain_core.split.step_time import Timing
from numpy.typing import NDArray

from heterotrain_planner.allocate.noise import noise_ceilings
from heterotrain_planner.allocate.problem import JobDemand, Pool
from heterotrain_planner.allocate.thinning import combine
from heterotrain_planner.allocate.value import (
    IN_TIME,
    LEAST_GAIN,
    MOST_VALUES,
    Floats,
    batch_worth,
    candidate_batches,
    exchange_scale,
    known_members,
    limits,
    rates,
    scores,
    timed,
)

MOST_COUNTED = 16_384
"""Numbers of workers of a job that are counted through."""
_MOST_GROUPS = 40
"""Groups of numbers of workers times candidate batches, if both are more."""
_GROUP_RATIO = 1.15
"""Least ratio of a group's most workers to its fewest."""
_INTERVALS = 16
"""Intervals of step times of one group and batch at first."""
_CUTS = 24
"""How often the group with the highest bound is looked at more closely."""
_PARTS = 4
"""Parts that each of its intervals is cut into, or its batches."""
_ALIKE = 0.01
"""Relative difference in worth between two batches that is not worth a closer look."""
_MOST_CUT = 48
"""Intervals that are cut at a time, those with the highest bounds."""
_CLOSE = 5e-4
"""Scores, times their weight, within which a closer look is not worth its time."""
_COUNT_PRICES = (0.0, 0.4, 1.0)
"""Prices of one worker that are tried, times the score's weight over the workers of the group."""
_MOST_MEMBERS_WITH_NOISE = 1000
"""Beyond these, the expected slowest member is taken from so many."""


def most_net_score(
    job: JobDemand, pools: Mapping[str, Pool], slots: Sequence[int], cost_P: Floats, *, listed: float
) -> float:
    """Return at least the best score, less the cost of workers, over all numbers of workers of the job.

    Args:
        job: the demand.
        pools: by name.
        slots: workers of the job's size that each of its pools holds when it is empty.
        cost_P: of one worker of each pool, not negative.
        listed: the best such score of the listed options; lower ones need not be known.
    """
    axes, together = limits(job, slots)
    most_rows = min(MOST_COUNTED, MOST_VALUES // (len(axes) * len(candidate_batches(job))))
    rows_OP = combine(axes, together, most_rows)
    if rows_OP is not None:
        rate_O = rates(job, rows_OP)
        if job.layouts is not None and not rate_O.any():
            rate_O = rates(replace(job, layouts=None), rows_OP)
        net_O = scores(job, pools, counts_OP=rows_OP, rate_O=rate_O).score_O - rows_OP @ cost_P
        return max(listed, float(net_O.max(initial=-math.inf)))
    most_P = np.array([axis[-1] if axis else 0 for axis in axes], dtype=float)
    return max(listed, _most_by_levels(job, most_P, cost_P, listed=listed))


class _Terms(NamedTuple):
    """What is common to all groups of a job.

    Attributes:
        weight: of the score.
        most_P: most workers of each pool.
        ranks_P: members of one worker.
        cost_P, price_P: of one worker, in score and in money.
        factor: on every rate, because a change has to gain something.
    """

    weight: float
    most_P: Floats
    ranks_P: Floats
    cost_P: Floats
    price_P: Floats
    factor: float


def _most_by_levels(job: JobDemand, most_P: Floats, cost_P: Floats, *, listed: float) -> float:
    terms = _Terms(
        job.weight * job.exponent,
        most_P,
        np.array([float(each.ranks) for each in job.pools]),
        cost_P,
        np.array([each.price_per_hour for each in job.pools]),
        1.0 - LEAST_GAIN if any(job.current.values()) else 1.0,
    )
    least, most = max(1, job.min_workers), int(min(job.max_workers, most_P.sum()))
    if job.layouts is not None:
        return float(_score(job, terms, np.array([job.layouts.most_per_s]), np.zeros(1), least)[0])
    groups = list(_all_groups(job, terms, least, most))
    # The highest bound of all decides: look closer there, until that no longer helps or is long enough.
    for _ in range(_CUTS if groups else 0):
        highest = max(groups, key=lambda group: group.above)
        if highest.above <= listed + _CLOSE * terms.weight:
            break
        if parts := highest.parts():
            groups.remove(highest)
            groups += parts
        else:
            highest.look_closer(listed)
    return max((group.above for group in groups), default=listed)


def _all_groups(job: JobDemand, terms: _Terms, least: int, most: int) -> Iterator[_Group]:
    """Yield every group of numbers of workers, with every candidate batch."""
    batches = candidate_batches(job)
    members = known_members(job)
    ratio = max(_GROUP_RATIO, (max(most, least) / least) ** (len(batches) / _MOST_GROUPS))
    while least <= most:
        largest = min(most, max(least, int(least * ratio)))
        ranks = np.array([int(least * terms.ranks_P.min())], dtype=np.int64)
        # Exchange takes longer with more members, so this is the least of the group; one worker needs no network.
        scale = min(float(exchange_scale(job, ranks, np.array([workers]))[0]) for workers in {least, 2})
        timing = Timing(members, job.communication, max(batches), exchange_L1=scale)
        noise = float(noise_ceilings(job.variation, np.minimum(ranks, _MOST_MEMBERS_WITH_NOISE), job.hiccups)[0])
        # Where members accumulate, any batch between the candidates may be one just before a further micro-batch.
        between = len(batches) > 1 and timing.accumulates
        for span in pairwise(batches) if between else zip(batches, batches, strict=True):
            yield _Group(job, terms, timing, workers=(least, largest), batches=span, factor=noise * terms.factor)
        least = largest + 1


def _worth(job: JobDemand, batch: float) -> float:
    """Return the weight of a sample in a batch; a deadline counts plain samples."""
    return 1.0 if job.objective is Objective.DEADLINE else float(batch_worth(job, [batch])[0])


def _score(job: JobDemand, terms: _Terms, rate_L: Floats, money_L: Floats, fewest: int) -> Floats:
    """Return the most that rates can score with workers of at least this price, before the cost of workers."""
    score_L: Floats = np.log(np.maximum(rate_L, 1e-300))
    positive = terms.price_P[terms.price_P > 0]
    if len(positive):
        cheapest = float(positive.min())
        dearness_L = np.log(np.maximum(money_L, cheapest))
        if len(positive) < len(terms.price_P):
            dearness_L = np.where(money_L > 0, dearness_L, min(0.0, math.log(cheapest)))
    else:
        dearness_L = np.full(len(rate_L), math.log(fewest))
    if job.objective is Objective.COST:
        score_L = score_L - dearness_L
    if timed(job) and job.remaining_samples is not None and job.deadline_s is not None:
        possible_L = job.remaining_samples <= rate_L * job.pace * max(0.0, job.deadline_s)
        score_L = score_L + np.where(possible_L, np.maximum(0.0, IN_TIME - dearness_L), 0.0)
    return terms.weight * score_L


class _Group:
    """Numbers of workers within a range, with one batch; ``above`` is at least their best net score."""

    def __init__(
        self,
        job: JobDemand,
        terms: _Terms,
        timing: Timing,
        *,
        workers: tuple[int, int],
        batches: tuple[float, float],
        factor: float,
    ) -> None:
        """Note the terms; ``batches`` are the least and the largest batch, and ``factor`` counts noise and changes."""
        self._job, self._terms, self._timing, self._factor = job, terms, timing, factor
        # The least batch of a span has to be taken, and the largest one counts, which is worth most.
        self._batch, self._largest_batch = batches
        self._worth = factor * self._largest_batch * _worth(job, self._largest_batch)
        self._fewest, self._largest = workers
        self.above = self._done = -math.inf
        # A little later, so that rounding excludes no worker's largest share.
        high = float(timing.step_s(timing.hi_W).max()) * (1 + 1e-12)
        if high <= 0:
            self.above = math.inf  # workers without any time of their own: no bound
            return
        edges = np.geomspace(high * 1e-9, high, 8 * _INTERVALS)
        enough = np.flatnonzero(self._sufficient(self._taken(edges)))
        if len(enough):
            edges = np.geomspace(edges[max(0, enough[0] - 1)], high, _INTERVALS + 1)
            edges[0] = 1e-12 * high if enough[0] == 0 else edges[0]
            self._start_L, self._end_L = edges[:-1], edges[1:]
            self._note()

    def parts(self) -> list[_Group]:
        """Return the groups of parts of its batches; none where these are alike."""
        if self._worth <= (1.0 + _ALIKE) * self._factor * self._batch * _worth(self._job, self._batch):
            return []
        edges = np.geomspace(self._batch, self._largest_batch, _PARTS + 1).tolist()
        edges[0], edges[-1] = self._batch, self._largest_batch
        return [
            _Group(
                self._job,
                self._terms,
                self._timing,
                workers=(self._fewest, self._largest),
                batches=span,
                factor=self._factor,
            )
            for span in pairwise(edges)
        ]

    def look_closer(self, target: float) -> None:
        """Cut the intervals with bounds above a score."""
        order = np.argsort(-self._net_L)
        order = order[self._net_L[order] > target]
        cut, rest = order[:_MOST_CUT], order[_MOST_CUT:]
        self._done = max(self._done, target, float(self._net_L[rest].max(initial=-math.inf)))
        ratio_LT = (self._end_L[cut] / self._start_L[cut])[:, None] ** np.linspace(0.0, 1.0, _PARTS + 1)
        edges = self._start_L[cut, None] * ratio_LT
        self._start_L, self._end_L = edges[:, :-1].ravel(), edges[:, 1:].ravel()
        self._note()

    def _note(self) -> None:
        self._net_L = self._net(self._start_L, self._end_L)
        self.above = max(self._done, float(self._net_L.max(initial=-math.inf)))

    def _taken(self, level_L: Floats) -> Floats:
        """Return the samples that one worker of each pool takes within each time."""
        taken_LP: Floats = self._timing.real_most(level_L[:, None])[0] * self._terms.ranks_P
        return taken_LP

    def _sufficient(self, each_LP: Floats) -> NDArray[np.bool_]:
        """Return whether the fastest workers of the group take the batch, if each takes so many samples."""
        order_LP = np.argsort(-each_LP, axis=1)
        most_LP = self._terms.most_P[order_LP]
        before_LP = np.cumsum(most_LP, axis=1) - most_LP
        counts_LP = np.clip(self._largest - before_LP, 0.0, most_LP)
        found: NDArray[np.bool_] = (counts_LP * np.take_along_axis(each_LP, order_LP, axis=1)).sum(axis=1) >= (
            self._batch * (1 - 1e-9)
        )
        return found

    def _net(self, start_L: Floats, end_L: Floats) -> Floats:
        """Return at least the best net score within each interval of step times."""
        terms = self._terms
        each_LP = self._taken(end_L)
        cost_L = np.full(len(end_L), self._fewest * float(terms.cost_P.min()))
        for part in _COUNT_PRICES:
            more = part * terms.weight / self._largest
            least_L = _least_sum(terms.cost_P + more, each_LP, terms.most_P, self._batch) - more * self._largest
            cost_L = np.maximum(cost_L, least_L)
        money_L = _least_sum(terms.price_P, each_LP, terms.most_P, self._batch) if terms.price_P.any() else cost_L
        with np.errstate(invalid="ignore"):
            rate_L = self._worth * self._pauses(end_L) / start_L
            net_L = _score(self._job, terms, rate_L, money_L, self._fewest) - cost_L
        return np.where(np.isfinite(cost_L) & self._sufficient(each_LP), net_L, -math.inf)

    def _pauses(self, end_L: Floats) -> Floats:
        """Return at least the part of the rate that pauses leave, where steps take at most so long.

        A member's own time is no longer than the step, so the pause is at least this part of it.
        """
        job = self._job
        if job.hiccups.pause_s <= 0:
            return np.ones(len(end_L))
        fewest = min(int(self._fewest * self._terms.ranks_P.min()), _MOST_MEMBERS_WITH_NOISE)
        fewest_L = np.full(len(end_L), fewest, dtype=np.int64)
        with_L = noise_ceilings(job.variation, fewest_L, job.hiccups, end_L)
        found_L: Floats = with_L / noise_ceilings(job.variation, fewest_L, job.hiccups)
        return found_L


def _least_sum(amount_P: Floats, each_LP: Floats, most_P: Floats, batch: float) -> Floats:
    """Return the least sum of amounts over real numbers of workers that take the batch; infinite where none do."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rate_LP = np.where(each_LP > 0, amount_P / each_LP, np.inf)
    order_LP = np.argsort(rate_LP, axis=1)
    room_LP = np.take_along_axis(each_LP * most_P, order_LP, axis=1)
    filled_LP = np.cumsum(room_LP, axis=1)
    taken_LP = np.clip(batch - (filled_LP - room_LP), 0.0, room_LP)
    sorted_LP = np.take_along_axis(rate_LP, order_LP, axis=1)
    sum_L = np.where(taken_LP > 0, sorted_LP, 0.0) * taken_LP
    least_L: Floats = np.where(filled_LP[:, -1] >= batch * (1 - 1e-9), sum_L.sum(axis=1), np.inf)
    return least_L
