"""The exported counters of the simulated ranks, with the content of a real scrape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from heterotrain_core.contract import metrics
from heterotrain_planner.perf.counters import CounterKey, Counters, Observation, observe
from numpy.typing import NDArray

from heterotrain_simulator.ground_truth import Times

Floats = NDArray[np.float64]


class SimulatedTelemetry:
    """Cumulative counters of all ranks, and the observations between scrapes.

    As in the trainer, each rank keeps at most ``metrics.MAX_LIVE_SHAPES`` shapes of step; the oldest is dropped first.
    """

    def __init__(self) -> None:
        """Begin without counters."""
        self._counters: dict[CounterKey, Counters] = {}
        self._scraped: dict[CounterKey, Counters] = {}
        self._exchange: dict[str, tuple[float, float, float]] = {}

    def record(
        self,
        member: str,
        *,
        share: int,
        micro_batch: int,
        times: Times,
        factor_N: Floats,
        finish_N: Floats,
        fraction_N: Floats,
        bucket_s: tuple[float, float] | None,
    ) -> None:
        """Add steps of one rank.

        Args:
            member: the rank's name.
            share: its samples in each step.
            micro_batch: its largest micro-batch.
            times: mean seconds of the share.
            factor_N: factor on the compute time of each step.
            finish_N: seconds from each step's begin to its end.
            fraction_N: gamma in the rank's measurement.
            bucket_s: T_o and T_u, ``None`` without an exchange.
        """
        key = CounterKey(member=member, share_samples=share, micro_batch_samples=micro_batch)
        before = self._counters.pop(key, None)
        forward_N, backward_N = times.forward_s * factor_N, times.backward_s * factor_N
        compute_N = forward_N + backward_N
        zero_N = np.zeros_like(factor_N)
        phases = {
            metrics.PHASE_LOAD: zero_N,
            metrics.PHASE_FORWARD: forward_N,
            metrics.PHASE_BACKWARD: backward_N,
            metrics.PHASE_SYNC: finish_N - compute_N,
            metrics.PHASE_UPDATE: zero_N,
            metrics.PHASE_COMPUTE: compute_N,
            metrics.PHASE_STEP: finish_N,
        }
        steps = len(factor_N)
        if bucket_s is not None:
            timed, overlapped_s, last_s = self._exchange.get(member, (0.0, 0.0, 0.0))
            self._exchange[member] = (
                timed + steps, overlapped_s + steps * bucket_s[0], last_s + steps * bucket_s[1],
            )  # fmt: skip
        exchange = self._exchange.get(member)
        # Popped and put back: the order of the dictionary is the order of last use.
        self._counters[key] = Counters(
            steps=(before.steps if before else 0.0) + steps,
            phase_s={p: (before.phase_s[p] if before else 0.0) + float(x.sum()) for p, x in phases.items()},
            phase_s2={p: (before.phase_s2[p] if before else 0.0) + float((x * x).sum()) for p, x in phases.items()},
            first_bucket_fraction=_sum(before.first_bucket_fraction if before else None, float(fraction_N.sum())),
            first_bucket_fraction_squared=_sum(
                before.first_bucket_fraction_squared if before else None, float((fraction_N**2).sum())
            ),
            bucket_steps=exchange[0] if exchange else None,
            overlapped_s=exchange[1] if exchange else None,
            last_bucket_s=exchange[2] if exchange else None,
        )
        mine = [k for k in self._counters if k.member == member]
        for old in mine[: -metrics.MAX_LIVE_SHAPES]:
            del self._counters[old]

    def forget(self, members: Sequence[str]) -> None:
        """Drop the counters of lost ranks."""
        gone = set(members)
        self._counters = {k: v for k, v in self._counters.items() if k.member not in gone}

    def scrape(self, at_s: float) -> tuple[Observation, ...]:
        """Return the observations since the last scrape."""
        found = observe(self._scraped, self._counters, ended_s=at_s)
        self._scraped = dict(self._counters)
        return found


def _sum(before: float | None, more: float) -> float:
    return more if before is None else before + more
