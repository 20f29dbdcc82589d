"""The true times of each rank and the true optimum, which no policy sees.

Legend: ``N`` steps, ``W`` ranks, ``K`` buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember, TableTime, micro_batch_count
from numpy.typing import NDArray

from heterotrain_simulator.buckets import Buckets, alone_s, cut, finish_s
from heterotrain_simulator.scenario import Noise, Scenario
from heterotrain_simulator.workloads import MILLISECOND_S, Points

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_GAMMA_NOISE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker with one rank.

    Attributes:
        name: unique for the whole run; a replacement has another name.
        pool, gpu: its pool and its GPU.
        index: counted within its pool, from 0.
    """

    name: str
    pool: str
    gpu: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Mean seconds of one share: forward and backward over all micro-batches, and backward of the last one."""

    forward_s: float
    backward_s: float
    last_backward_s: float
    micro_batches: int

    @property
    def before_s(self) -> float:
        """Seconds before the backward pass of the last micro-batch."""
        return self.forward_s + self.backward_s - self.last_backward_s


class GroundTruth:
    """The truth of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        """Read the tables of the scenario's workload."""
        self.scenario = scenario
        self.buckets: Buckets = cut(
            scenario.workload.gradient_bytes, gamma=scenario.gamma, bucket_bytes=scenario.bucket_bytes
        )
        self._tables = {group.gpu: _seconds(scenario.workload.step_ms[group.gpu]) for group in scenario.groups}
        self._times = lru_cache(maxsize=None)(self._computed)
        self._optima: dict[tuple[int, tuple[str, ...]], Split | None] = {}

    def memory_samples(self, gpu: str) -> int:
        """Return the largest micro-batch: the largest measured one."""
        return self._tables[gpu][-1][0]

    def times(self, gpu: str, samples: int) -> Times:
        """Return mean seconds of a share without slowdown; larger shares than the memory are accumulated."""
        return self._times(gpu, samples)

    def _computed(self, gpu: str, samples: int) -> Times:
        count = micro_batch_count(samples, self.memory_samples(gpu))
        if count == 0:
            return Times(forward_s=0.0, backward_s=0.0, last_backward_s=0.0, micro_batches=0)
        xs, ys = zip(*self._tables[gpu], strict=True)
        small, larger = divmod(samples, count)
        small_s, large_s = float(np.interp(small, xs, ys)), float(np.interp(small + 1, xs, ys))
        whole_s = (count - larger) * small_s + larger * large_s
        part = self.scenario.workload.backward_part
        return Times(
            forward_s=(1 - part) * whole_s,
            backward_s=part * whole_s,
            last_backward_s=part * small_s,
            micro_batches=count,
        )

    def transfer_s(self, ranks: int) -> Floats:
        """Return each bucket's transfer seconds, ``_K``."""
        return self.scenario.network.transfer_s(self.buckets.size_bytes_K, ranks)

    def slowdown(self, worker: Worker, at_s: float) -> float:
        """Return the factor on the worker's compute time."""
        ratio = 1.0
        for slow in self.scenario.slowdowns:
            mine = slow.pool == worker.pool and slow.worker in (None, worker.index)
            if mine and slow.from_s <= at_s < slow.until_s:
                ratio *= slow.ratio
        return ratio

    def deviates(self, before_W: Floats, steps: int, rng: np.random.Generator) -> Floats:
        """Return standard normal deviates of each rank and step, ``_NW``, correlated with the step before.

        Args:
            before_W: deviates of the step before; NaN for a new rank.
            steps: number of steps.
            rng: for the draws.
        """
        drawn_NW = rng.standard_normal((steps, len(before_W)))
        correlation = self.scenario.noise.correlation
        if correlation <= 0:
            return drawn_NW
        fresh = math.sqrt(1 - correlation**2)
        for step in range(steps):
            followed_W = correlation * before_W + fresh * drawn_NW[step]
            drawn_NW[step] = before_W = np.where(np.isnan(before_W), drawn_NW[step], followed_W)
        return drawn_NW

    def phases(self, before_W: Flags, steps: int, rng: np.random.Generator) -> Flags:
        """Return whether each rank is in a slow phase in each step, ``_NW``: a chain of two states.

        Args:
            before_W: whether it was in the step before.
            steps: number of steps.
            rng: for the draws.
        """
        noise, phase_NW = self.scenario.noise, np.zeros((steps, len(before_W)), dtype=bool)
        if noise.phase_probability > 0:
            drawn_NW = rng.random(phase_NW.shape)
            for step in range(steps):
                limit_W = np.where(before_W, 1 - 1 / noise.phase_steps, noise.phase_probability)
                phase_NW[step] = before_W = drawn_NW[step] < limit_W
        return phase_NW

    def factors(
        self, workers: Sequence[Worker], deviate_NW: Floats, phase_NW: Flags, at_s: float, rng: np.random.Generator
    ) -> Floats:
        """Return the factor on each rank's compute time in each step, ``_NW``; its mean is 1 for usual steps."""
        noise: Noise = self.scenario.noise
        own = {group.pool: group.variation for group in self.scenario.groups if group.variation is not None}
        variation_W = np.array([own.get(worker.pool, noise.variation) for worker in workers])
        sigma_W = np.sqrt(np.log1p(variation_W**2))
        factor_NW: Floats = np.exp(sigma_W * deviate_NW - sigma_W**2 / 2)
        if noise.hiccup_probability > 0:
            hit_NW = rng.random(deviate_NW.shape) < noise.hiccup_probability
            tail_NW = 1 + rng.pareto(noise.hiccup_index, hit_NW.shape) if noise.hiccup_index > 0 else 1.0
            factor_NW = np.where(hit_NW, noise.hiccup_ratio * tail_NW * factor_NW, factor_NW)
        factor_NW = np.where(phase_NW, noise.phase_ratio * factor_NW, factor_NW)
        slow_W = np.array([self.slowdown(worker, at_s) for worker in workers])
        slowed_NW: Floats = factor_NW * slow_W
        return slowed_NW

    def steps_s(self, times: Sequence[Times], factor_NW: Floats) -> Floats:
        """Return each step's seconds, ``_N``, bucket by bucket."""
        before_W = np.array([t.before_s for t in times])
        last_W = np.array([t.last_backward_s for t in times])
        transfer_s_K = self.transfer_s(len(times))
        return finish_s(before_W * factor_NW, last_W * factor_NW, self.buckets.ready_K, transfer_s_K)

    def first_bucket_fractions(self, steps: int, ranks: int, rng: np.random.Generator) -> Floats:
        """Return the measured gamma of each rank and step, ``_NW``."""
        noisy = self.buckets.gamma + _GAMMA_NOISE * rng.standard_normal((steps, ranks))
        return np.clip(noisy, 0.0, 1.0)

    def planned_s(self, workers: Sequence[Worker], shares: Sequence[int], at_s: float) -> float:
        """Return the step's seconds with these shares, without noise."""
        times = [self.times(worker.gpu, share) for worker, share in zip(workers, shares, strict=True)]
        slow_1W = np.array([[self.slowdown(worker, at_s) for worker in workers]])
        return float(self.steps_s(times, slow_1W)[0])

    def solo_samples_per_s(self, workers: Sequence[Worker], shares: Sequence[int], at_s: float) -> float:
        """Return the sum of share / own compute seconds."""
        total = 0.0
        for worker, share in zip(workers, shares, strict=True):
            times = self.times(worker.gpu, share)
            if share:
                total += share / ((times.forward_s + times.backward_s) * self.slowdown(worker, at_s))
        return total

    def optimum(self, workers: Sequence[Worker], batch_samples: int, at_s: float) -> Split | None:
        """Return the true optimum without noise; it is exact, because ranks are separable (see ``buckets``).

        Each rank's own end of the step, exchange included, is tabulated for every share and given to the split as a
        measured table. ``None`` if the batch is smaller than the number of workers.
        """
        slow = tuple(self.slowdown(worker, at_s) for worker in workers)
        key = (batch_samples, tuple(f"{worker.gpu}*{ratio}" for worker, ratio in zip(workers, slow, strict=True)))
        if key not in self._optima:
            members = [
                SplitMember(compute=self._table(worker.gpu, ratio, len(workers), batch_samples))
                for worker, ratio in zip(workers, slow, strict=True)
            ]
            split = balance(batch_samples, members)
            self._optima[key] = split if isinstance(split, Split) else None
        return self._optima[key]

    def _table(self, gpu: str, slowdown: float, ranks: int, most: int) -> TableTime:
        transfer_s_K = self.transfer_s(ranks)
        times = [self.times(gpu, share) for share in range(1, most + 1)]
        before = np.array([t.before_s for t in times]) * slowdown
        last = np.array([t.last_backward_s for t in times]) * slowdown
        ends = alone_s(before, last, self.buckets.ready_K, transfer_s_K)
        return TableTime(points=tuple(enumerate(ends.tolist(), start=1)))


def _seconds(points: Points) -> Points:
    return tuple((samples, ms * MILLISECOND_S) for samples, ms in points)
