"""The trend of the loss: climbs are found at every scale, and noise, plateaus and learning are none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId
from heterotrain_operator.prom.history import TelemetryHistory
from heterotrain_operator.prom.loss_trend import LossTrend
from heterotrain_operator.prom.snapshot import JobSeries
from support.fake_cluster import a_running_job
from support.repeat import times

Loss = Callable[[int], float]
LEARNS: Loss = lambda at: 10 * math.exp(-at / 300) + 2  # noqa: E731  # a curve of the tables below


def noted(loss: Loss, scrapes: int, *, wanders: float = 0.0, seed: int = 0) -> tuple[LossTrend, int | None]:
    """Return the trend after so many scrapes, and the first with a climb; noise wanders from one scrape to the next."""
    chance = random.Random(seed)  # noqa: S311  # repeats the noise
    trend, first, noise = LossTrend(), None, 0.0
    for at in range(scrapes):
        noise = wanders * noise + chance.gauss(0, 0.3 * math.sqrt(1 - wanders**2))
        trend.note(3 * at, loss(at) + noise)
        first = at if first is None and trend.climb is not None else first
    return trend, first


@pytest.mark.parametrize("seed", range(times(gate=2, every=100)))
@pytest.mark.parametrize("wanders", [0.0, 0.9])
@pytest.mark.parametrize(
    "loss",
    [LEARNS, lambda _: 2.0, lambda at: -0.001 * at, lambda at: LEARNS(at) + 0.2 * math.sin(at / 40)],
    ids=["learns", "plateau", "falls below zero", "cycles"],
)
def test_noise_and_learning_are_no_climb(loss: Loss, wanders: float, seed: int) -> None:
    assert noted(loss, 2500, wanders=wanders, seed=seed)[1] is None


@pytest.mark.parametrize(
    ("loss", "begins", "latest"),
    [
        (lambda at: LEARNS(at) + max(0, at - 1000) * 0.004, 1000, 2200),
        (lambda at: LEARNS(at) + max(0, at - 1000) * 0.0005, 1000, 6500),
        (lambda at: 2 + at * 0.02, 0, 300),
        (lambda at: LEARNS(at) if at < 1000 else 50.0 + at - 1000, 1000, 1250),
    ],
    ids=["soon", "slowly", "from the start", "explodes"],
)
def test_a_climb_is_found_and_says_from_where(loss: Loss, begins: int, latest: int) -> None:
    for seed in range(times(gate=2, every=40)):
        trend, first = noted(loss, latest, seed=seed)
        assert first is not None
        assert first >= begins
        assert trend.climb is not None
        assert trend.climb.from_loss < trend.climb.loss
        assert trend.climb.from_step < trend.climb.step


def test_a_loss_that_stays_high_diverges_until_it_comes_halfway_back() -> None:
    trend, _ = noted(lambda at: 2.0 + min(8.0, max(0, at - 300) * 0.05), 1500)
    assert trend.climb is not None, "it has stopped climbing, at 10"
    chance = random.Random(1)  # noqa: S311  # repeats the noise
    for at in range(1500, 1800):
        trend.note(3 * at, 2.0 + chance.gauss(0, 0.3))
    assert trend.climb is None


def read(step: int, loss: float | None) -> JobSeries:
    return JobSeries(counters={}, gauges={MemberId("u0", 0): MemberGauges(worker="job-w0", step=step, loss=loss)})


def test_a_job_tells_that_it_diverges_and_a_resumed_one_begins_again() -> None:
    cluster, history = a_running_job(), TelemetryHistory()
    for at in range(300):
        history.take(read(10 * at, 2.0 + 0.1 * at), {MemberId("u0", 0): float(at)}, pools={})
    cluster.telemetry = history.telemetry
    cluster.settle()
    assert cluster.condition("Diverging") == ("True", "LossClimbs")
    assert "lower the learning rate" in cluster.message("Diverging")
    history.take(read(500, 2.0), {MemberId("u0", 0): 301.0}, pools={})
    cluster.telemetry = history.telemetry
    cluster.settle()
    assert cluster.condition("Diverging") == ("False", "NotClimbing")


def test_losses_that_are_no_numbers_or_absent_are_left_to_other_conditions() -> None:
    history = TelemetryHistory()
    for at in range(200):
        loss = (None, math.nan, math.inf, 1.0)[at % 4]
        history.take(read(at, loss), {MemberId("u0", 0): float(at)}, pools={})
    assert history.telemetry.loss_climb is None
