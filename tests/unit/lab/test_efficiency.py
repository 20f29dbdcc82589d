"""The ceiling of a run equals the efficiency of perfectly balanced workers with its noise, however much they share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from heterotrain_core.contract import metrics
from lab.cluster import Cluster
from lab.efficiency import measure
from lab.telemetry import PhaseTotals, Prometheus, Shape

STEPS = 4000
SHARES = {"a": 400, "b": 200, "c": 100}
OWN = 0.05


class Recorded(Prometheus):
    """The data of a Prometheus about workers with these step times in seconds, one array per worker."""

    def __init__(self, seconds: Mapping[str, np.ndarray]) -> None:
        super().__init__(Cluster())
        object.__setattr__(self, "seconds", seconds)

    def totals(self, job_uid: str, phase: str, *, window_s: float = 7200) -> Mapping[Shape, PhaseTotals]:
        del job_uid, window_s
        step = np.max(list(self.seconds.values()), axis=0)
        of_phase = {
            metrics.PHASE_COMPUTE: lambda own: own,
            metrics.PHASE_STEP: lambda _: step,
            metrics.PHASE_SYNC: lambda own: step - own,
        }[phase]
        return {
            Shape(worker=f"{name}-0", local_rank="0", share_samples=SHARES[name], micro_batch_samples=0): PhaseTotals(
                steps=STEPS, seconds=float(of_phase(own).sum()), squared_seconds=float((of_phase(own) ** 2).sum())
            )
            for name, own in self.seconds.items()
        }

    def value(self, expression: str) -> float | None:
        del expression
        return float(sum(SHARES.values()))


@pytest.mark.parametrize("common", [0.0, 0.05, 0.15])
def test_a_perfect_split_reaches_its_ceiling(common: float) -> None:
    """Common noise affects all workers alike; only their own noise makes others wait."""
    rng = np.random.default_rng(7)
    shared = np.exp(common * rng.standard_normal(STEPS))
    seconds = {name: shared * (1 + OWN * rng.standard_normal(STEPS)) for name in SHARES}
    (found,) = measure(Recorded(seconds), "uid", {f"{name}-0": name for name in SHARES})
    assert found.ceiling == pytest.approx(found.efficiency, abs=0.006)
    assert found.ceiling < 0.98
