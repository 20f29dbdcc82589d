"""A plan that trains far slower than it predicts is taken back at the next step, and only such a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_operator.decide.plan.braking import NEXT_STEP
from support.exported_counters import three_pools
from support.fake_cluster import FakeCluster
from support.repeat import times
from support.simulated_training import Training

BATCH, STEPS = 192, 400


def a_training(seed: int, *, scrape_every: int, rebalance: dict[str, Any]) -> Training:
    """Return a job of speeds 4 : 2 : 1 in an epoch that is longer than the test."""
    spec = {
        "training": {"epochs": 9, "globalBatchSize": BATCH, "rebalance": rebalance},
        "elasticPolicy": {"minReplicas": 1},
    }
    cluster = FakeCluster(spec=spec).with_nodes("a", "b", "c").start()
    return Training(
        cluster,
        three_pools(),
        epoch_samples=BATCH * STEPS,
        scrape_every=scrape_every,
        communication=CommunicationTime(),
        variation=0.05,
        seed=seed,
    )


def thrash(training: Training, *, above_samples: int, ratio: float) -> None:
    """Let the fastest member take far longer for shares that no line through smaller ones foretells."""
    step = training.speeds._step  # the seam of this test

    def stepped(shares: Sequence[int]) -> None:
        training.speeds.slow = {0: ratio} if shares[0] > above_samples else {}
        step(shares)

    training.speeds._step = stepped  # type: ignore[method-assign]  # the same


@pytest.mark.parametrize("rebalance", [{}, {"boundary": "Steps", "everySteps": 100}], ids=["Auto", "Steps"])
@pytest.mark.parametrize("seed", range(times(gate=2, every=100)))
def test_a_plan_that_is_far_slower_than_predicted_ends_at_the_next_step(seed: int, rebalance: dict[str, Any]) -> None:
    """The oracle counts steps that are slower than half as fast as with even shares: a scrape or two of them."""
    chance = np.random.default_rng(seed)
    scrape_every = int(chance.integers(3, 8))
    training = a_training(seed, scrape_every=scrape_every, rebalance=rebalance)
    while training.roster.plan.shares[0] <= 70:
        training.step()
    thrash(training, above_samples=training.roster.plan.shares[0] - 2, ratio=float(chance.uniform(5, 9)))
    before = len(training.speeds.step_seconds)
    for _ in range(150):
        training.step()
    took = np.array(training.speeds.step_seconds[before:])
    even_s = max(
        c.per_sample_s * 64 + c.fixed_s + c.backward_per_sample_s * 64 + c.backward_fixed_s for c in three_pools()
    )
    slow = took > 1.3 * even_s
    runs = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], slow, [0]]))))[::2] if slow.any() else np.array([0])
    assert runs.max() <= 3 * scrape_every + 1, "no run of slow steps lasts until a boundary"
    assert slow.mean() < 0.3


@pytest.mark.parametrize("seed", range(times(gate=2, every=100)))
def test_slowness_of_all_members_at_once_is_not_the_plan_s_fault(seed: int) -> None:
    chance = np.random.default_rng(seed)
    training = a_training(seed, scrape_every=4, rebalance={"boundary": "Steps", "everySteps": 50})
    for _ in range(120):
        training.step()
    for _ in range(100):
        training.speeds.slow = dict.fromkeys(range(3), float(chance.uniform(2.5, 3.5)))
        training.step()
        assert training.plan.boundary != NEXT_STEP
