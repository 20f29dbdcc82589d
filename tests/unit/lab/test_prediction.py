"""The benchmark of predictions: no step is lost between two reads, and its standard error is correct."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from heterotrain_core.contract import metrics
from heterotrain_planner.perf.counters import MeanVariance, Observation
from lab.cluster import Cluster
from lab.scrapes import Scrapes, mean_with_error
from lab.telemetry import Prometheus

LABELS = {
    metrics.LABEL_WORKER: "a-0",
    metrics.LABEL_WORKER_UID: "uid",
    metrics.LABEL_LOCAL_RANK: "0",
    metrics.LABEL_MICRO_BATCH: "0",
}


class Recorded(Prometheus):
    """Prometheus with two shares' counters, scraped every second: share 10 for five steps a second, then share 20."""

    def __init__(self) -> None:
        super().__init__(Cluster())

    def query(self, expression: str) -> list[dict[str, Any]]:
        assert expression.endswith("s]")
        found = []
        for share, began, ended in ((10, 0, 8), (20, 6, 14)):
            steps = [(at + 0.4, 5.0 * min(at - began + 1, ended - began)) for at in range(began, 20)]
            labels = LABELS | {metrics.LABEL_SHARE: str(share)}
            by_name = {metrics.STEPS: 1.0, metrics.PHASE_SECONDS: 0.01 * share, metrics.PHASE_SECONDS_SQUARED: 1.0}
            for name, each in by_name.items():
                values = [[at, str(each * count)] for at, count in steps]
                phase = {} if name == metrics.STEPS else {metrics.LABEL_PHASE: "step"}
                found.append({"metric": labels | phase | {"__name__": name}, "values": values})
        return found


def test_one_late_read_gives_the_same_observations_as_many_early_ones() -> None:
    def read(*times_s: float) -> list[Observation]:
        scrapes = Scrapes(Recorded(), "job", known_s=0.0)
        for time_s in times_s:
            scrapes.read(until_s=time_s)
        return scrapes.observations

    seen = read(20.0)
    assert seen == read(3.3, 7.0, 7.2, 20.0)
    assert [(o.share_samples, o.steps) for o in seen if o.ended_s == 6.4] == [(10, 5), (20, 5)]
    assert {share: sum(o.steps for o in seen if o.share_samples == share) for share in (10, 20)} == {10: 40, 20: 40}
    assert all(o.step is not None and o.step.mean == pytest.approx(0.01 * o.share_samples) for o in seen)
    assert [o.ended_s for o in seen if o.warm_up] == [0.4]


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_the_standard_error_of_a_measurement_is_correct(correlation: float) -> None:
    """80 steps, scraped every two: the estimated error of the mean equals its deviation over many runs."""
    rng = np.random.default_rng(11)
    means, errors = [], []
    for _ in range(300):
        noise = [float(rng.standard_normal())]
        for fresh in rng.standard_normal(79).tolist():
            noise.append(correlation * noise[-1] + math.sqrt(1 - correlation**2) * fresh)
        step_s = 1 + 0.08 * np.array(noise)
        observations = [
            Observation(
                member="a", share_samples=1, steps=2, ended_s=float(at), step=MeanVariance(mean=float(two.mean()))
            )
            for at, two in enumerate(step_s.reshape(-1, 2))
        ]
        mean, error = mean_with_error({"a": observations})
        means.append(mean)
        errors.append(error)
    assert float(np.mean(means)) == pytest.approx(1.0, abs=0.003)
    assert math.sqrt(float(np.mean(np.square(errors)))) == pytest.approx(float(np.std(means)), rel=0.2)
