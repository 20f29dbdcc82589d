"""Hooks that run every few steps, in one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from heterotrain import UsageError
from heterotrain.data.progress import Progress
from heterotrain.errors import PeerLost
from heterotrain.state.training import TrainState
from heterotrain.steps.hooks import Hooks
from support.one_process import DATA, a_job, squared_error


def test_hooks_run_after_every_n_steps_and_before_those_of_the_epoch() -> None:
    """Six steps in two epochs; each hook has its own interval, and runs in eval mode without gradients."""
    job, model, optimizer = a_job()
    seen: list[tuple[str, int]] = []

    @job.every_steps(3)
    def third(steps: int) -> None:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append(("third", steps))

    job.every_steps(2)(lambda steps: seen.append(("second", steps)))
    job.on_epoch_end(lambda epoch: seen.append(("epoch", epoch)))
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)
        seen.append(("step", step.number))
    assert [entry for entry in seen if entry[0] != "step"] == [
        ("second", 2), ("third", 3), ("epoch", 0), ("second", 4), ("third", 6), ("second", 6), ("epoch", 1),
    ]  # fmt: skip
    assert seen.index(("second", 2)) == seen.index(("step", 1)) + 1
    assert model.training


def test_values_of_a_hook_are_reported_with_the_number_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    """As those of hooks at the end of an epoch are."""
    job, model, optimizer = a_job(epochs=1)
    job.every_steps(2)(lambda steps: {"twice": 2 * steps})
    with caplog.at_level("INFO", logger="heterotrain"):
        for step in job.steps(DATA):
            with step:
                for x, y in step.micro_batches():
                    step.backward(squared_error(model, x, y))
                step.apply(optimizer)
    assert "2 steps done: twice 4" in caplog.messages


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_an_interval_is_a_whole_number_of_at_least_one(steps: float) -> None:
    """The mistake is named where it is made, not after the first step."""
    job, *_ = a_job()
    with pytest.raises(UsageError, match="whole number of at least 1"):
        job.every_steps(steps)  # type: ignore[arg-type]  # the mistake


@pytest.mark.parametrize("hook", [lambda: None, lambda _a, _b: None, 3])
def test_a_hook_that_does_not_take_its_argument_is_refused_where_it_is_given(hook: Any) -> None:
    job, *_ = a_job()
    for register in (job.on_epoch_end, job.every_steps(2), job.on_restore, job.on_leader_change):
        with pytest.raises(UsageError, match="one argument"):
            register(hook)
    job.on_epoch_end(lambda *_: None)
    with pytest.raises(UsageError, match=r"write @job.every_steps\(500\)"):
        job.every_steps(hook if callable(hook) else print)  # type: ignore[arg-type]  # the mistake


def test_hooks_of_an_epoch_count_once_all_ranks_have_called_them() -> None:
    """A rank that is lost behind the own rank's hook, but before the end of another one's, repeats it on both."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = TrainState(model=model, optimizers=[optimizer], progress=Progress(steps=3, epoch=1))
    hooks = Hooks(training, MagicMock(), MagicMock(), epochs=2)

    def decay(_epoch: int) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    hooks.after_epochs.append(decay)
    context = MagicMock(agree_on_end=MagicMock(side_effect=[PeerLost("rank 1"), None]))
    with pytest.raises(PeerLost):
        hooks.finish_epoch(context)
    assert training.progress.evaluated == 0
    assert hooks.finish_epoch(context)
    assert training.progress.evaluated == 1
    assert optimizer.param_groups[0]["lr"] == 0.5
