"""A time that no step falls below, whatever members, orders, cuts, sizes of micro-batches and shares are chosen.

It holds for predicted steps as ``whole_step`` works them out: simulated schedules, updates, and the exchange. Cuts are
between the groups of units that the planner cuts between, and sizes of micro-batches are those of the problem.

**One pipeline.** Let a stage be p-th from the end, busy for t = f + b in each of n micro-batches, with stages in front
of it that are busy for A together, and stages behind it for Z. It starts after a forward pass through A, and a backward
pass through A follows its end. Between its first forward pass and its first backward pass lie both passes of all
stages behind it, and it has only p − 1 forward passes to run meanwhile, so it is idle for Z − (p − 1) f. Between its
last forward and its last backward pass it is idle for Z − (p − 1) b. For n > p these times do not overlap:

    share ≥ A + n t + 2 Z − (p − 1) t

Let t be the slowest of P stages and W = A + t + Z. The P − p stages in front take at most t each. So for n > P,

    share ≥ 2 W + (n − P − 1) t,      and always   share ≥ n t,   share ≥ W + (n − 1) t / 2

The last one follows the first micro-batch to a stage, all forward or all backward passes there, and a last one back.

**All pipelines of a multiset.** t is at least the slowest stage of the reach table, which is exact over orders and
cuts. Let y_k be any price of a second on kind k, and Ω the units' least prices, Σ_u min_k y_k t_ku. Stages of at most t
earn Ω together, so W is at least their least sum, which has the dearest kinds busy for t and the next one for the rest.
That sum is convex in t and falls. Its tangent at the table's t gives the least right side above over all longer t.

**One sharded member.** A pass is no shorter than the gathers and reductions of equal parts, nor than the work of its
samples at each kind's best rate.

**All members.** With m members, the exchange is the busiest device's. A member's devices hold the G bytes together, so
one of them takes ``2 (m − 1) (latency + G / (m Σ bandwidth))`` at least, over the fastest links that a ring of m
owners can have; the sum is over the member's devices. One member has no more than an m-th of all devices. What the
step leaves after exchange and update is the time of the member's share. The members are an integer programme then, and
a step is too short where its relaxation, or branch and bound, proves that no members take the batch. Numbers of members
are divided into ranges, each with the exchange of its fewest; the range with the least bound is halved.

Legend: ``J`` multisets, ``B`` sizes of micro-batches, ``K`` kinds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from heterotrain_core.contract.plan import LayoutKind

from heterotrain_planner.layout.costs import MOST_CLASSES, Floats, Ints
from heterotrain_planner.layout.integer import choose
from heterotrain_planner.layout.level import MOST_MEMBERS
from heterotrain_planner.layout.pass_time import DeviceTimes
from heterotrain_planner.layout.sharded import MOST_MICRO_BATCH
from heterotrain_planner.layout.simplex import maximise
from heterotrain_planner.layout.template_table import FEW_DEVICES, FEW_MICRO_BATCHES, TemplateTable

MOST_RANGES = 16
"""Ranges of numbers of members for which the programme is solved."""
CLOSE = 0.0005
"""Distance between a time that is proved too short and one that is not, as a ratio, at which a search ends."""
_TRIALS = 12, 6
"""Times that are tried for members in parts, and for whole ones."""
_ROUNDING = 1e-9
_PROOF = 1e-6
"""Part of a batch that has to be missing: the simplex method ends that close to its optimum."""


def least_step(
    templates: TemplateTable, devices: Sequence[int], kinds: frozenset[LayoutKind], *, known_s: float
) -> float:
    """Return seconds that no step falls below; ``known_s`` at most, and 0 where links count as slower ones.

    Args:
        templates: of the model.
        devices: by kind, that members may use; at most those of the table.
        kinds: layouts that members may have; replicated ones always belong to them.
        known_s: a step of known members.
    """
    problem, names = templates.problem, [kind.name for kind in templates.problem.kinds]
    if len({problem.link(one, other) for one in names for other in names}) > MOST_CLASSES:
        return 0.0  # a layout by its own links may be shorter than any by the slower ones
    bound = _Bound(templates, np.array(devices, dtype=np.int64), kinds, known_s)
    first = max(1, problem.least_members)
    last = max(first, min(MOST_MEMBERS, sum(devices), problem.batch_samples))
    queue = [(bound.within(first, last, 0.0), first, last)]
    for _ in range(MOST_RANGES // 2):
        bound_s, first, last = queue[0]
        if first == last or bound_s >= known_s * (1 - CLOSE):
            break
        heapq.heappop(queue)
        middle = int((first * last) ** 0.5)
        for part in ((first, middle), (middle + 1, last)):
            heapq.heappush(queue, (bound.within(*part, bound_s), *part))
    return min(queue[0][0], known_s)


class _Bound:
    """What all ranges share."""

    def __init__(self, templates: TemplateTable, devices_K: Ints, kinds: frozenset[LayoutKind], known_s: float) -> None:
        self._problem, self._devices_K, self._known_s = templates.problem, devices_K, known_s
        self._bytes = float(sum(unit.parameter_bytes for unit in self._problem.units))
        self._update_K = np.array([kind.update_s_per_byte for kind in self._problem.kinds])
        self._sizes = [size for size in self._problem.micro_batches if size <= MOST_MICRO_BATCH]
        every_JK = templates.family.counts_UK
        memory_K = np.array([float(kind.memory_bytes) for kind in self._problem.kinds])
        holds_J = every_JK @ memory_K >= self._problem.state_ratio * self._bytes * (1 - _ROUNDING)
        columns = np.flatnonzero((every_JK <= devices_K).all(axis=1) & holds_J)
        self._need_JK = every_JK[columns]
        self._size_J = self._need_JK.sum(axis=1)
        longest = self._problem.most_stages if LayoutKind.PIPELINE in kinds else 1
        self._pipelines = [Pipelines(templates, row, columns, longest) for row in range(len(templates.costs))]
        self._shards = LayoutKind.SHARDED in kinds and bool(self._sizes)
        self._pass_BJ = self._passes() if self._shards else np.zeros((0, len(columns)))
        self._most_devices = int(devices_K.sum()) if self._shards else longest
        # Members of multisets that are not in the table, as parts of columns for single devices.
        limits = templates.family.most_by_kinds
        known = min(*limits, len(limits)) if len(limits) < int((devices_K > 0).sum()) else min(limits)
        missing = not templates.complete or (self._shards and known < devices_K.sum())
        self._further_K = np.flatnonzero(devices_K) if missing else np.zeros(0, dtype=np.int64)
        self._rate_K = self._further_rates(templates, known) if missing else np.zeros(0)
        self._needs = self._needed()
        self._basis: tuple[int, ...] = ()

    def within(self, first: int, last: int, low_s: float) -> float:
        """Return a time that is too short for so many members, from ``low_s``, which is; the known one at most."""
        high_s = self._known_s
        if not self._reach(high_s, first, last):
            return high_s
        for _ in range(_TRIALS[0]):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if self._reach(middle_s, first, last) else (middle_s, high_s)
        high_s = self._known_s
        for _ in range(_TRIALS[1] if not len(self._further_K) else 0):
            if high_s <= low_s * (1 + CLOSE):
                break
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if self._whole_reach(middle_s, first, last) else (middle_s, high_s)
        return low_s

    def _reach(self, step_s: float, first: int, last: int) -> bool:
        """Return whether from ``first`` to ``last`` members in parts take the batch within a step."""
        value_J, limits = self._values(step_s, first), self._limits(last)
        found = maximise(value_J, self._needs.T, limits, least=first, start=self._basis)
        self._basis = self._basis if found is None else found.basis
        return found is not None and found.value >= self._problem.batch_samples * (1 - _PROOF)

    def _whole_reach(self, step_s: float, first: int, last: int) -> bool:
        value_J, wanted = self._values(step_s, first), float(self._problem.batch_samples)
        used = np.flatnonzero(value_J > 0)
        needs, limits = self._needs[used].astype(np.int64), self._limits(last).astype(np.int64)
        return choose(value_J[used], needs, limits, least=first, wanted=wanted).bound >= wanted * (1 - _PROOF)

    def _needed(self) -> Floats:
        """Return what a member uses up: devices, and one place."""
        own = np.column_stack([self._need_JK, np.ones(len(self._need_JK))])
        single = np.eye(len(self._devices_K), own.shape[1])[self._further_K]
        return np.vstack([own, single])

    def _limits(self, last: int) -> Floats:
        return np.append(self._devices_K, last).astype(float)

    def _values(self, step_s: float, members: int) -> Floats:
        """Return the samples that members of each column take at most, after exchange and update of so many members."""
        least_s, exchange_J, update_J = self._after(members)
        left_J = step_s - np.maximum(exchange_J, least_s) - update_J
        value_J = np.zeros(len(self._need_JK))
        for each in self._pipelines:
            value_J = np.maximum(value_J, each.samples * each.most(left_J))
        for size, pass_J in zip(self._sizes, self._pass_BJ, strict=False):
            value_J = np.maximum(value_J, size * _whole(np.maximum(left_J, 0.0) / pass_J))
        further = max(0.0, step_s - least_s) * self._rate_K
        values: Floats = np.minimum(np.concatenate([value_J, further]), self._problem.batch_samples)
        return values

    def _after(self, members: int) -> tuple[float, Floats, Floats]:
        """Return the least exchange of so many members, and those of each multiset: exchange, and update."""
        with np.errstate(divide="ignore", invalid="ignore"):
            update_J = self._bytes / (self._need_JK @ np.where(self._update_K > 0, 1 / self._update_K, 1e300))
            if members == 1 or not self._bytes:
                return 0.0, np.zeros(len(update_J)), update_J
            latency_K, pace_K = self._ring(members)
            rounds = 2 * (members - 1)
            latency_J = np.where(self._need_JK > 0, latency_K, np.inf).min(axis=1, initial=np.inf)
            exchange_J = rounds * (latency_J + self._bytes / members / (self._need_JK @ pace_K))
            most = min(self._most_devices, float(self._devices_K.sum()) / members)
            least_s = rounds * (float(latency_K.min()) + self._bytes / members / (most * float(pace_K.max())))
        return least_s, exchange_J, update_J

    def _ring(self, members: int) -> tuple[Floats, Floats]:
        """Return latency and bytes per second of the fastest links of rings with an owner of each kind.

        A ring of one kind needs so many devices of it. Any other one has a link from each of its kinds to another.
        """
        problem, present = self._problem, [k for k in range(len(self._devices_K)) if self._devices_K[k]]
        latency_K, pace_K = np.full(len(problem.kinds), np.inf), np.full(len(problem.kinds), 1e-300)
        for one in present:
            for other in present:
                if one != other or self._devices_K[one] >= members:
                    link = problem.link(problem.kinds[one].name, problem.kinds[other].name)
                    latency_K[one] = min(latency_K[one], link.latency_s)
                    pace_K[one] = max(pace_K[one], min(link.bytes_per_s, 1e300))
        return latency_K, pace_K

    def _passes(self) -> Floats:
        """Return the least seconds of a sharded member's pass by size of micro-batch; infinite for one device."""
        problem, names = self._problem, [kind.name for kind in self._problem.kinds]
        masks, inverse = np.unique(self._need_JK > 0, axis=0, return_inverse=True)
        pace, latency = [], []
        for mask in masks:
            own = np.flatnonzero(mask).tolist()
            pairs = [(a, b) for a in own for b in own if a < b] or [(own[0], own[0])]
            links = [problem.link(names[a], names[b]) for a, b in pairs]
            pace.append(min(link.bytes_per_s for link in links))
            latency.append(max(link.latency_s for link in links))
        inverse = inverse.reshape(-1)
        pace_J, latency_J = np.array(pace)[inverse], np.array(latency)[inverse]
        rounds_J = 2.0 * (self._size_J - 1)
        moved_J = rounds_J * (self._bytes / self._size_J / pace_J + len(problem.units) * latency_J)
        found = [np.maximum(size / (self._need_JK @ self._best_rates(size)), moved_J) for size in self._sizes]
        return np.where(self._size_J > 1, np.array(found), np.inf)

    def _best_rates(self, most_samples: int) -> Floats:
        """Return the most samples per second of whole passes of each kind, with at most so many at a time."""
        samples_M = np.arange(1, most_samples + 1)
        kinds = self._problem.kinds
        seconds_KM = np.array([DeviceTimes(self._problem, kind.name, most_samples).compute_M[1:] for kind in kinds])
        return np.asarray((samples_M / seconds_KM).max(axis=1))

    def _further_rates(self, templates: TemplateTable, known: int) -> Floats:
        """Return samples per second of single devices in members of more than ``known`` devices."""
        largest = max(self._sizes, default=1)
        rate_K = np.zeros(len(self._devices_K))
        if self._shards:
            rate_K = self._best_rates(largest)
            if largest <= known + 1:  # each device computes a sample in each pass, one of weight zero if need be
                rate_K = self._best_rates(1) * largest / (known + 1)
        if not templates.complete:
            for costs in templates.costs:
                seconds_KE = np.diff(costs.forward_KE + costs.backward_KE, axis=1)
                price_K = 1 / seconds_KE.sum(axis=1)
                least = float((price_K[:, None] * seconds_KE)[self._devices_K > 0].min(axis=0).sum())
                rate_K = np.maximum(rate_K, costs.micro_batch_samples * price_K / least)
        return rate_K[self._further_K]


class Pipelines:
    """The most micro-batches of one size that pipelines on each multiset have within a time.

    Args:
        templates: of the model.
        row: of the table.
        columns: multisets that count.
        longest: devices of a member.
    """

    def __init__(self, templates: TemplateTable, row: int, columns: Ints, longest: int) -> None:
        costs, need_JK = templates.costs[row], templates.family.counts_UK[columns]
        self.samples, self._limit = costs.micro_batch_samples, costs.micro_batches
        self._size_J = need_JK.sum(axis=1)
        self._allowed = self._size_J <= longest
        seconds_KE = np.diff(costs.forward_KE + costs.backward_KE, axis=1)
        price_K = 1 / seconds_KE.sum(axis=1)
        masks, inverse = np.unique(need_JK > 0, axis=0, return_inverse=True)
        least = [float((price_K[:, None] * seconds_KE)[mask].min(axis=0).sum()) for mask in masks]
        work_J = np.array(least)[inverse.reshape(-1)]
        self._slowest_J = templates.slowest_BU[row, columns]
        self._planned = _Trade.of(need_JK, price_K, work_J, self._slowest_J)
        # Members of fewer micro-batches than stages keep fewer than planned here: memory is left out for them.
        few = sum(kind.count for kind in templates.problem.kinds) <= FEW_DEVICES
        self._few_J = np.array(
            [
                max((n for n in range(1, size) if not few or n not in FEW_MICRO_BATCHES), default=0)
                for size in self._size_J
            ]
        )
        self._free_s = work_J / (need_JK @ price_K)
        self._free = _Trade.of(need_JK, price_K, work_J, self._free_s)

    def most(self, left_J: Floats) -> Floats:
        """Return the most micro-batches within the time that is left to each multiset."""
        planned_J = np.where(np.isfinite(self._slowest_J), self._planned.most(left_J, self._size_J), 0.0)
        free_J = np.minimum(self._free.most(left_J, self._size_J), self._few_J)
        return np.where(self._allowed, np.minimum(np.maximum(planned_J, free_J), self._limit), 0.0)


class _Trade:
    """Slowest stage t against all stages W, by multiset.

    Args:
        slowest_J: the least t.
        whole_J: the least W at that t.
        slope_J: by which it changes with longer t, at most 0.
    """

    def __init__(self, slowest_J: Floats, whole_J: Floats, slope_J: Floats) -> None:
        self._slowest_J, self._whole_J, self._slope_J = slowest_J, whole_J, slope_J

    @classmethod
    def of(cls, need_JK: Ints, price_K: Floats, work_J: Floats, slowest_J: Floats) -> _Trade:
        """Return the least W of stages of at most t that earn the work: the dearest kinds are busy for t."""
        slowest_J = np.where(np.isfinite(slowest_J), slowest_J, 1.0)
        left_J, whole_J = work_J.copy(), np.zeros(len(work_J))
        slope_J, stages_J, price_J = np.full(len(work_J), -np.inf), np.zeros(len(work_J)), np.zeros(len(work_J))
        for kind in np.argsort(-price_K).tolist():
            price, own_J = float(price_K[kind]), need_JK[:, kind]
            room_J = own_J * slowest_J * price
            ends = np.isinf(slope_J) & (own_J > 0) & (room_J >= left_J * (1 - _ROUNDING))
            slope_J[ends] = (stages_J - price_J / price)[ends]
            used_J = np.minimum(room_J, left_J)
            whole_J, left_J = whole_J + used_J / price, left_J - used_J
            stages_J, price_J = stages_J + own_J, price_J + own_J * price
        return cls(slowest_J, whole_J, np.minimum(slope_J, 0.0))

    def most(self, left_J: Floats, size_J: Ints) -> Floats:
        """Return the most micro-batches that no inequality excludes, 0 where even one is too long."""
        left_J, slowest_J = np.maximum(left_J, 0.0), self._slowest_J
        busy_J = _whole(left_J / slowest_J)
        # A longer t shortens the right side only for so few micro-batches that its coefficient is negative.
        few_J = np.ceil(-2 * self._slope_J) - 1
        more_J = size_J + 1 + np.maximum(few_J, _whole((left_J - 2 * self._whole_J) / slowest_J))
        early_J = 1 + np.maximum(few_J, _whole(2 * (left_J - self._whole_J) / slowest_J))
        filled_J = np.where(more_J > size_J, more_J, np.minimum(early_J, size_J))
        return np.where(size_J > 1, np.clip(np.minimum(busy_J, filled_J), 0.0, None), busy_J)


def _whole(ratio: Floats) -> Floats:
    """Return the largest whole numbers, or the next ones where rounding may be what is missing."""
    found: Floats = np.floor(ratio + _ROUNDING * (1 + np.abs(ratio)))
    return found
