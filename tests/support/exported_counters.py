"""Simulated members that export counters as the trainer does: the ground truth for fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from heterotrain_core.contract import metrics
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance, evaluate
from heterotrain_core.split.member import SplitMember, micro_batch_count
from heterotrain_planner.perf.counters import CounterKey, Counters, Observation, observe


@dataclass(kw_only=True)
class SimulatedMembers:
    """Members of known speed that run noisy steps and count them.

    Attributes:
        truth: time models by rank.
        communication: the exchange.
        variation: relative standard deviation of each member's compute seconds in a step, independent.
        seed: of the noise.
        overhead_s: seconds of a step outside of all phases.
        warm_up: factor on each member's first two steps.
        slow: factor on each member's seconds from now on; may be changed.
        micro_caps: largest micro-batches.
    """

    truth: Sequence[ComputeTime]
    communication: CommunicationTime = field(default_factory=CommunicationTime)
    variation: float = 0.0
    seed: int = 0
    overhead_s: float = 0.0
    warm_up: float = 1.0
    slow: dict[int, float] = field(default_factory=dict)
    micro_caps: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.steps_run = 0
        self.step_seconds: list[float] = []
        self._sums: dict[CounterKey, dict[str, float]] = {}
        self._exchange = [0.0, 0.0, 0.0]
        self._scraped: dict[CounterKey, Counters] = {}
        self._scrapes = 0

    def name(self, rank: int) -> str:
        """Return a member's name."""
        return f"w{rank}/0"

    def run(self, shares: Sequence[int], steps: int = 1) -> None:
        """Run some steps with these shares."""
        for _ in range(steps):
            self._step(shares)

    def _step(self, shares: Sequence[int]) -> None:
        rows = []
        for rank, (c, n) in enumerate(zip(self.truth, shares, strict=True)):
            micro = micro_batch_count(n, self.micro_caps.get(rank))
            factor = max(0.05, 1 + self.variation * self.rng.standard_normal()) * self.slow.get(rank, 1.0)
            factor *= self.warm_up if self.steps_run < 2 else 1.0
            before = factor * (c.per_sample_s * n + c.fixed_s * micro)
            backward = factor * (c.backward_per_sample_s * n + c.backward_fixed_s * micro)
            last = factor * (c.backward_per_sample_s * (n // max(micro, 1)) + c.backward_fixed_s) if n else 0.0
            rows.append((before, backward, last, factor * c.update_s))
        comm = self.communication
        ended = max(max(b + p + u, b + p + u - (1 - comm.gamma) * last + comm.overlapped_s) for b, p, last, u in rows)
        ended += comm.last_bucket_s
        self.step_seconds.append(ended + self.overhead_s)
        self.steps_run += 1
        for rank, (n, (before, backward, _, update)) in enumerate(zip(shares, rows, strict=True)):
            micro = self.micro_caps.get(rank)
            key = CounterKey(member=self.name(rank), share_samples=n, micro_batch_samples=min(n, micro) if micro else n)
            own = before + backward + update
            fraction = min(1.0, max(0.0, comm.gamma + 0.02 * self.rng.standard_normal()))
            sums = self._sums.setdefault(key, {})
            values = {
                metrics.PHASE_LOAD: 0.1 * before,
                metrics.PHASE_FORWARD: 0.9 * before,
                metrics.PHASE_BACKWARD: backward,
                metrics.PHASE_UPDATE: update,
                metrics.PHASE_COMPUTE: own,
                metrics.PHASE_SYNC: ended - own,
                metrics.PHASE_STEP: ended + self.overhead_s,
                "gamma": fraction,
            }
            for what, value in [("steps", 1.0), *values.items(), *((f"{w}²", v * v) for w, v in values.items())]:
                sums[what] = sums.get(what, 0.0) + value
        for i, value in enumerate((1.0, comm.overlapped_s, comm.last_bucket_s)):
            self._exchange[i] += value

    def counters(self) -> dict[CounterKey, Counters]:
        """Return the current counters."""
        return {
            key: Counters(
                steps=sums["steps"],
                phase_s={phase: sums[phase] for phase in metrics.PHASES},
                phase_s2={phase: sums[f"{phase}²"] for phase in metrics.PHASES},
                first_bucket_fraction=sums["gamma"],
                first_bucket_fraction_squared=sums["gamma²"],
                bucket_steps=self._exchange[0],
                overlapped_s=self._exchange[1],
                last_bucket_s=self._exchange[2],
            )
            for key, sums in self._sums.items()
        }

    def scrape(self) -> tuple[Observation, ...]:
        """Return observations since the last scrape."""
        now = self.counters()
        self._scrapes += 1
        found = observe(self._scraped, now, ended_s=15.0 * self._scrapes)
        self._scraped = now
        return found

    def members(self) -> list[SplitMember]:
        """Return the true models as the split's members."""
        return [
            SplitMember(compute=c, micro_cap_samples=self.micro_caps.get(rank)) for rank, c in enumerate(self.truth)
        ]

    def loss_of(self, shares: Sequence[int]) -> float:
        """Return the relative excess of a noiseless step with these shares over the optimum, e.g. 0.02."""
        best = balance(sum(shares), self.members(), communication=self.communication)
        mine = evaluate(shares, self.members(), communication=self.communication)
        assert isinstance(best, Split)
        assert isinstance(mine, Split)
        return mine.step_s / best.step_s - 1


def three_pools(scale_s: float = 0.001) -> list[ComputeTime]:
    """Return members of speeds 4 : 2 : 1 with some fixed parts."""
    return [
        ComputeTime(
            per_sample_s=scale_s * slowness,
            fixed_s=20 * scale_s,
            backward_per_sample_s=2 * scale_s * slowness,
            backward_fixed_s=10 * scale_s,
            update_s=10 * scale_s,
        )
        for slowness in (1, 2, 4)
    ]
