"""What a script may ask of its phases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.steps.phases import TrainingPhase
from support.one_process import DATA, a_job, squared_error


def trained(job: Any, model: Any, optimizer: Any, data: Any = DATA, **phase: int) -> list[tuple[int, int]]:
    """Train a phase and return (epoch, number) of its steps."""
    found = []
    for step in job.steps(data, **phase):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)
        found.append((step.epoch, step.number))
    return found


def test_phases_share_the_epochs_of_a_training() -> None:
    job = a_job(epochs=3)
    assert trained(*job, epochs=1) == [(0, 0), (0, 1), (0, 2)]
    assert trained(*job, torch.utils.data.Subset(DATA, range(8)), epochs=1) == [(1, 3)]
    assert trained(*job) == [(2, 4), (2, 5), (2, 6)]
    assert trained(*job) == []


def test_a_phase_by_steps_ends_its_epoch() -> None:
    job = a_job(epochs=None, steps=6)
    ended: list[int] = []
    job[0].on_epoch_end(ended.append)
    assert trained(*job, steps=4) == [(0, 0), (0, 1), (0, 2), (1, 3)]
    assert trained(*job) == [(2, 4), (2, 5)]
    assert ended == [0, 1]


@pytest.mark.parametrize(
    ("settings", "phase", "message"),
    [
        ({"epochs": 2}, {"epochs": 3}, "take 3 epochs, and the whole training has 2: give epochs=3 or more"),
        ({"epochs": 2}, {"steps": 3}, "this training is by epochs, so a phase takes epochs= as well"),
        ({"epochs": None, "steps": 9}, {"epochs": 3}, "this training is by steps, so a phase takes steps= as well"),
        ({"epochs": 2}, {"epochs": 0}, "job.steps: epochs must be a whole number of at least 1, not 0"),
        ({"epochs": 2}, {"epochs": True}, "job.steps: epochs"),
    ],
)
def test_a_part_that_the_training_does_not_have_is_refused(
    settings: dict[str, Any], phase: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trained(*a_job(**settings), **phase)


def test_a_loop_after_the_end_without_phases_is_refused() -> None:
    job = a_job()
    trained(*job)
    with pytest.raises(UsageError, match="give each call its part"):
        trained(*job)


def test_finish_ends_all_phases() -> None:
    job = a_job(epochs=3)
    job[0].on_epoch_end(lambda _epoch: job[0].finish("enough"))
    assert len(trained(*job, epochs=1)) == 3
    assert trained(*job) == []


def test_other_data_after_a_break_is_refused() -> None:
    job, model, optimizer = a_job(epochs=3)
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)
        break
    with pytest.raises(UsageError, match="in the middle of an epoch, and begins another one"):
        trained(job, model, optimizer, torch.utils.data.Subset(DATA, range(8)))


def test_a_divided_model_has_one_phase() -> None:
    phase = TrainingPhase(is_last=False, last_epoch=1, is_one_of_several=True)
    with pytest.raises(UsageError, match="phases need ranks that hold the whole model"):
        phase.may_begin(is_over=False, has_phases=False)
