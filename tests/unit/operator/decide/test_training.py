"""Complete trainings: how often plans are written, how good the first is, and how an adaptive batch uses samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from heterotrain_core.contract.plan import BoundaryKind, CommunicationTime, ComputeTime
from support.exported_counters import SimulatedMembers, three_pools
from support.fake_cluster import FakeCluster
from support.repeat import times
from support.simulated_training import Training

EXCHANGE = CommunicationTime(overlapped_s=0.05, last_bucket_s=0.01, gamma=0.2)
BATCH = 512
STEPS = 40
EPOCH = {"boundary": "Epoch"}
SCRAPE_STEPS = times(gate=5, every=2)


SLOW_EXCHANGE = CommunicationTime(overlapped_s=0.3, last_bucket_s=0.5, gamma=0.2)


def a_training(
    *,
    seed: int = 0,
    exchange: CommunicationTime = EXCHANGE,
    truth: Sequence[ComputeTime] = tuple(three_pools()),
    least_workers: int = 1,
    scrape_steps: int = SCRAPE_STEPS,
    **training: Any,
) -> Training:
    """Return a job on pools with speeds 4 : 2 : 1, with 40 steps per epoch and a scrape every few steps."""
    batch = {} if "adaptiveBatch" in training else {"globalBatchSize": BATCH}
    spec = {"training": {"epochs": 100, **batch, **training}, "elasticPolicy": {"minReplicas": least_workers}}
    cluster = FakeCluster(spec=spec).with_nodes("a", "b", "c").start()
    return Training(
        cluster,
        truth,
        epoch_samples=BATCH * STEPS + 77,
        scrape_every=scrape_steps,
        communication=exchange,
        variation=0.05,
        seed=seed,
        warm_up=4.0,
    )


def test_few_revisions_in_the_first_epoch_and_the_last_is_near_the_optimum() -> None:
    """Each scrape could give one, but the second epoch's plan is within 2 % of the optimum in the median."""
    lost, written, refined = [], [], 0
    for seed in range(times(gate=4, every=8)):
        training = a_training(seed=seed, rebalance=EPOCH)
        training.epoch()
        lost.append(training.speeds.loss_of(training.plan.shares))
        written.append(len(training.revisions))
        refined += training.revisions[-1][1] > STEPS * 0.85
    assert float(np.median(lost)) <= 0.02
    assert max(lost) <= 0.06
    assert float(np.median(written)) <= 3
    assert max(written) <= 5
    assert refined > 0, "a scrape just before the boundary still improves the plan"


def test_by_default_the_first_epoch_trains_with_learned_shares() -> None:
    """Plain DDP keeps even shares: its step is that of the slowest pool. No step is spent on a probe."""
    lost, saved = [], []
    for seed in range(times(gate=4, every=60)):
        training = a_training(seed=seed)
        even = SimulatedMembers(truth=three_pools(), communication=EXCHANGE, variation=0.05, seed=seed, warm_up=4.0)
        even.run((171, 171, 170), STEPS)
        training.epoch()
        lost.append(training.speeds.loss_of(training.roster.plan.shares))
        saved.append(1 - sum(training.speeds.step_seconds[:STEPS]) / sum(even.step_seconds))
        assert not training.plan.probe
        assert training.adopted_at % 10 == 0
    assert float(np.median(lost)) <= 0.02
    assert max(lost) <= 0.06
    assert min(saved) > 0.2


def test_a_settled_job_is_left_alone() -> None:
    training = a_training(seed=3)
    for _ in range(3):
        training.epoch()
    settled = len(training.revisions)
    for _ in range(times(gate=3, every=5)):
        training.epoch()
    assert len(training.revisions) - settled <= 2
    assert training.cluster.condition("SpeedsLearned") == ("True", "Learned")
    assert training.cluster.condition("StragglerDetected") == ("False", "NoStraggler")


@pytest.mark.heavy
def test_the_prediction_is_compared_with_the_measurement() -> None:
    """Only steps at the plan's own shares count, once it has taken effect; before that, nothing is reported."""
    training = a_training(seed=1, scrape_steps=2, rebalance=EPOCH)
    training.epoch()
    assert "prediction" not in training.cluster.status
    for _ in range(3):
        training.epoch()
    prediction = training.cluster.status["prediction"]
    assert prediction["plan"] == training.cluster.status["plan"]["applied"]
    assert prediction["predictedStepSeconds"] == pytest.approx(prediction["measuredStepSeconds"], rel=0.03)
    at_plan = [s for s in training.speeds.step_seconds[-STEPS:] if s > 0.5]  # an epoch's last step is short
    assert prediction["measuredStepSeconds"] == pytest.approx(float(np.mean(at_plan)), rel=0.03)
    ratio = prediction["measuredStepSeconds"] / prediction["predictedStepSeconds"]
    training.speeds.slow = dict.fromkeys(range(3), 1.15)
    training.epoch()
    now = training.cluster.status["prediction"]
    assert now["measuredStepSeconds"] / now["predictedStepSeconds"] > ratio + 0.01


def test_a_baseline_reports_that_speeds_are_known_at_its_shares_only() -> None:
    training = a_training(rebalance={"boundary": "Never"})
    training.epoch_samples = BATCH * STEPS  # no short last step, which would be a second share
    training.epoch()
    assert training.cluster.condition("SpeedsLearned") == ("False", "Learning")
    for _ in range(2):
        training.epoch()
    assert training.cluster.condition("SpeedsLearned") == ("False", "PartlyLearned")
    assert "only one share was observed" in training.cluster.message("SpeedsLearned")


def test_a_throttled_worker_is_reported_with_its_slowdown() -> None:
    training = a_training(seed=2, rebalance=EPOCH)
    for _ in range(2):
        training.epoch()
    training.speeds.slow = {0: 1.4}  # less than what takes a plan back at once
    training.epoch()
    assert training.cluster.condition("SpeedsLearned") == ("False", "SpeedChanged")
    assert re.search(r"job-w0 takes 1\.[345] times as long", training.cluster.message("SpeedsLearned"))
    assert training.cluster.events.count("WorkerSpeedChanged") == 1
    for _ in range(3):
        training.epoch()
    assert training.cluster.condition("SpeedsLearned") == ("True", "Learned")
    assert training.cluster.events.count("WorkerSpeedChanged") == 1


@pytest.mark.parametrize("least_workers", [1, 3])
def test_a_straggler_is_reported_with_the_gain_if_the_job_can_run_without_it(least_workers: int) -> None:
    """Its fixed time alone exceeds a step of the others; if all three workers are needed, none is reported."""
    pools = three_pools()
    training = a_training(truth=(*pools[:2], replace(pools[2], fixed_s=3.0)), least_workers=least_workers)
    for _ in range(3):
        training.epoch()
    cluster = training.cluster
    if least_workers == 3:
        assert cluster.condition("StragglerDetected") == ("False", "NoStraggler")
        return
    assert cluster.condition("StragglerDetected") == ("True", "WorkerTooSlow")
    assert "job-w2 (pool c): it cannot go below its floor of 1 samples" in cluster.message("StragglerDetected")
    assert "% less)" in cluster.message("StragglerDetected")
    assert cluster.events.count("StragglerDetected") == 1


ADAPTIVE = {"adaptiveBatch": {"min": BATCH, "max": 8192}}


@pytest.mark.parametrize(
    "rebalance",
    [{"boundary": "Epoch"}, {"boundary": "Steps", "everySteps": 15}, {"boundary": "Never"}],
    ids=lambda rebalance: rebalance["boundary"],
)
def test_the_batch_follows_the_noise_at_boundaries_and_no_sample_is_lost(rebalance: dict[str, Any]) -> None:
    """Every epoch uses each sample once and in order, whatever the batch, by the trainer's own rules."""
    training = a_training(seed=4, exchange=SLOW_EXCHANGE, rebalance=rebalance, **ADAPTIVE)
    batches, starts = [], []
    while training.progress.epoch < 5:
        training.noise_samples = 400.0 * 8**training.progress.epoch
        before = training.roster
        training.step()
        if training.roster is not before:
            starts.append(training.adopted_at)
        batches.append(training.roster.plan.global_batch_samples)
        if training.progress.steps % training.scrape_every == 0:
            reported = batches[-1], training.noise_samples
    assert batches[0] == BATCH
    assert batches[-1] > 2 * BATCH
    assert all(new <= 4.2 * old for old, new in pairwise(batches)), "step by step"
    for epoch in range(5):
        assert training.taken[epoch] == list(range(training.epoch_samples))
    steps = training.plan.boundary.kind is BoundaryKind.STEPS
    assert all(start == 0 or (steps and start % 15 == 0) for start in starts)
    status = training.cluster.status
    assert status["globalBatchSize"] == reported[0], "as of the last scrape"
    assert status["noiseScaleSamples"] == float(f"{reported[1]:.4g}")
    assert "BatchPlanned" in training.cluster.events
    assert "at a noise scale of" in status["batchReason"]
    even = max(training.roster.shares) - min(training.roster.shares) <= 1
    assert even == (rebalance["boundary"] == "Never")


def test_a_change_of_speed_does_not_block_the_batch_where_shares_never_vary() -> None:
    """Even shares never show a second share: the batch waits for some steps, not for a complete model."""
    training = a_training(
        seed=4, exchange=SLOW_EXCHANGE, rebalance={"boundary": "Never"}, scrape_steps=times(gate=4, every=2), **ADAPTIVE
    )
    training.epoch_samples = BATCH * STEPS  # no short last step either
    conditions = []
    while training.progress.epoch < 3:
        training.noise_samples = 4000.0 * 8**training.progress.epoch
        if training.progress.steps == STEPS // 2:
            training.speeds.slow = {0: 1.4, 1: 1.3}
        training.step()
        conditions.append(training.cluster.condition("SpeedsLearned"))
    assert ("False", "SpeedChanged") in conditions
    assert conditions[-1] != ("False", "SpeedChanged")
    assert training.roster.plan.global_batch_samples > BATCH


def test_without_a_noise_scale_the_batch_keeps_its_first_size() -> None:
    training = a_training(**ADAPTIVE)
    for _ in range(2):
        training.epoch()
    assert training.cluster.status["globalBatchSize"] == BATCH
    assert training.plan.global_batch_samples == BATCH
    assert "BatchPlanned" not in training.cluster.events
    assert "the noise scale is not known yet" in training.cluster.status["batchReason"]


def test_the_batch_is_no_larger_than_an_epoch() -> None:
    very_slow = replace(SLOW_EXCHANGE, last_bucket_s=3.0)
    training = a_training(seed=5, exchange=very_slow, adaptiveBatch={"min": BATCH, "max": 10**6})
    training.epoch_samples = BATCH * 10
    training.noise_samples = 1e9
    while training.progress.epoch < 12:
        training.step()
    assert training.plan.global_batch_samples == training.epoch_samples


@pytest.mark.heavy
@pytest.mark.parametrize(("noise_samples", "least", "most"), [(400.0, 110, 230), (12.0, 32, 50)])
def test_even_shares_find_their_batch_although_shares_never_vary(noise_samples: float, least: int, most: int) -> None:
    """Half of a small step is fixed time, which one share cannot show: a larger batch is tried, and kept if better."""
    truth = [
        replace(c, fixed_s=0.02 * slow, backward_fixed_s=0.01 * slow)
        for c, slow in zip(three_pools(), (1, 2, 4), strict=True)
    ]
    training = a_training(seed=2, truth=truth, rebalance={"boundary": "Never"}, adaptiveBatch={"min": 32, "max": 512})
    training.epoch_samples = 32 * 64  # no last, smaller step that would show another share
    training.noise_samples = noise_samples
    while training.progress.epoch < 6:
        training.step()
    assert least <= training.roster.plan.global_batch_samples <= most
    assert len({share // 2 for share in training.plan.shares}) <= 2


def test_a_new_generation_keeps_the_batch_in_force() -> None:
    """A new generation starts in the middle of an epoch: it uses the batch in force, not the pending one."""
    training = a_training(seed=6, exchange=SLOW_EXCHANGE, **ADAPTIVE)
    training.epoch()
    training.noise_samples = 1e6
    while training.plan.global_batch_samples == BATCH and training.progress.epoch < 3:
        training.step()
    assert training.plan.global_batch_samples > BATCH
    assert training.roster.plan.global_batch_samples == BATCH
    training.cluster.vanish("job-w2")
    training.cluster.step()
    assert training.plan.generation == 2
    assert training.plan.global_batch_samples == BATCH
    assert sum(training.plan.shares) == BATCH
