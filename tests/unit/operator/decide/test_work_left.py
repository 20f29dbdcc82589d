"""How much of a training is done, by epochs and by steps."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_core.contract.config import ANY_EPOCHS
from heterotrain_operator.api.reading import read_spec
from heterotrain_operator.api.training import Training
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Rates, Telemetry
from heterotrain_operator.decide.objects.training_settings import training_config
from heterotrain_operator.decide.work_left import WorkLeft, work_left
from support.fake_cluster import a_running_job


def reported(**gauges: Any) -> MemberGauges:
    return MemberGauges(worker="job-w0", **gauges)


@pytest.mark.parametrize(
    ("training", "gauges", "percent", "samples"),
    [
        ({"epochs": 4}, {"step": 7, "epoch": 1, "epoch_samples": 100, "cursor_samples": 50}, 37, 250),
        ({}, {"step": 7, "epoch": 0, "epoch_samples": 100, "cursor_samples": 25}, 25, 75),
        ({"epochs": 4}, {"step": 7, "epoch": 9, "epoch_samples": 100}, 100, 0),
        ({"steps": 200}, {"step": 50, "global_batch_samples": 64}, 25, 150 * 64),
        ({"steps": 200}, {"step": 0}, 0, 200 * 32),
        ({"steps": 200}, {"step": 10**15, "global_batch_samples": 64}, 100, 0),
    ],
)
def test_the_rest_counts_epochs_or_steps(
    training: dict[str, int], gauges: dict[str, int], percent: int, samples: int
) -> None:
    found = work_left(Training(globalBatchSize=32, **training), reported(**gauges))  # type: ignore[arg-type]  # aliases
    assert found == WorkLeft(percent=percent, samples=samples)


@pytest.mark.parametrize(
    ("training", "gauges"),
    [
        ({"epochs": 4}, {"step": 7, "epoch": 1}),
        ({"epochs": 4}, {"step": 7, "epoch_samples": 100}),
        ({"epochs": 4}, {"step": 7, "epoch": 1, "epoch_samples": -100}),
        ({"steps": 4}, {"epoch": 1, "epoch_samples": 100}),
        ({"steps": 4}, {"step": -1}),
    ],
)
def test_nothing_is_said_without_a_position_or_a_length(training: dict[str, int], gauges: dict[str, int]) -> None:
    assert work_left(Training(globalBatchSize=32, **training), reported(**gauges)) is None  # type: ignore[arg-type]  # aliases
    assert work_left(Training(globalBatchSize=32, **training), None) is None  # type: ignore[arg-type]  # aliases


def test_steps_reach_the_trainer_and_the_status() -> None:
    cluster = a_running_job(training={"globalBatchSize": 100, "steps": 1000})
    config = training_config(read_spec(cluster.job), grace_s=30.0)
    assert (config.epochs, config.steps) == (ANY_EPOCHS, 1000)
    first = MemberId(cluster.plan_json["ranks"][0]["worker_uid"], 0)
    gauges = reported(step=400, samples_committed=40_000, global_batch_samples=100, epoch=3)
    cluster.telemetry = Telemetry(gauges={first: gauges}, rates=Rates(samples_per_s=50.0), sequence=1)
    cluster.settle()
    assert (cluster.status["progress"], cluster.status["estimatedRemainingSeconds"]) == ("40%", 600 * 100 / 50)
