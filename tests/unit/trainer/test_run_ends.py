"""How a run without an operator begins and ends: its first and last line, and what is left of one that ends early."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.errors import UsageError

DATA = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(24, 1))


@pytest.fixture(autouse=True)
def _tidy(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Undo the changes of ``init`` to the process after each test."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("heterotrain.termination_message.TerminationMessage.install", lambda _self: None)
    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level(logging.INFO, logger="heterotrain"):
        yield
    signal.signal(signal.SIGTERM, before)


def train(
    folder: Path | None,
    *,
    epochs: int | None = 2,
    steps: int | None = None,
    in_step: Callable[[heterotrain.Job, int], Any] = lambda _job, _number: None,
    breaks_after: int | None = None,
) -> list[int]:
    """Train in steps of 8 samples, three an epoch, and return the numbers of the committed ones.

    ``in_step`` is called in each step after a forward pass, which has changed running statistics by then.
    """
    job = heterotrain.init(
        batch_samples=8, epochs=epochs, steps=steps, checkpoint_uri=folder, checkpoint_interval_s=86_400
    )
    model = job.wrap(torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    done = []
    for step in job.steps(DATA):
        with step:
            for (x,) in step.micro_batches():
                loss = model(x).square().mean()
                in_step(job, step.number)
                step.backward(loss)
            step.apply(optimizer)
        done.append(step.number)
        if step.number + 1 == breaks_after:
            break
    return done


def fails_in(step: int) -> Callable[[heterotrain.Job, int], None]:
    """Return a function that raises an error in one step."""

    def fail(_job: heterotrain.Job, number: int) -> None:
        if number == step:
            raise ZeroDivisionError

    return fail


def saved(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return step and model of the newest checkpoint."""
    newest = CheckpointFolder(folder, max_to_keep=1).load_newest()
    assert newest is not None
    return newest[0].step, newest[1]["model"]


def test_a_loop_that_is_left_keeps_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint is written at once, the log says where it is, and the next run goes on."""
    assert train(tmp_path, breaks_after=4) == [0, 1, 2, 3]
    assert saved(tmp_path)[0] == 4
    assert f"after 4 steps: its checkpoint is in {tmp_path}" in caplog.text
    assert train(tmp_path) == [4, 5]


def test_an_error_in_a_step_leaves_the_state_before_it(tmp_path: Path) -> None:
    """Also the running statistics, which the failed step has changed."""
    train(tmp_path / "left", breaks_after=4)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "failed", in_step=fails_in(4))
    (steps, expected), (found_steps, found) = saved(tmp_path / "left"), saved(tmp_path / "failed")
    assert (steps, found_steps) == (4, 4)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_script_that_fails_at_once_leaves_nothing(tmp_path: Path) -> None:
    """Nor does one that goes on from a checkpoint: the next attempt may have another model."""
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, in_step=fails_in(0))
    assert CheckpointFolder(tmp_path, max_to_keep=1).newest() is None


def test_without_a_folder_the_log_says_that_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    """The steps are lost then."""
    train(None, breaks_after=2)
    assert "after 2 steps: nothing is saved without a checkpoint_uri" in caplog.text


def test_the_first_and_the_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training of a second says what it does, too."""
    train(tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert "training on cpu, ranks: 1, global batch: 8 samples, epochs: 2, an epoch has 24 samples" in lines
    last = next(line for line in lines if line.startswith("the training has ended after 6 steps in 2 epochs, loss "))
    assert last.endswith(f": every epoch is committed; its checkpoint is in {tmp_path}")


def test_a_finished_run_says_so_and_goes_on_with_more_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever starts it again is told how to."""
    train(tmp_path)
    assert train(tmp_path) == []
    assert "an earlier run has finished the training after 6 steps in 2 epochs. To go on, ask for more" in caplog.text
    assert train(tmp_path, epochs=3) == [6, 7, 8]


def test_a_run_that_the_script_has_ended_goes_on_with_more_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With as many as before, it stays ended."""

    def end(job: heterotrain.Job, number: int) -> None:
        if number == 1:
            job.finish("good enough")

    assert train(tmp_path, in_step=end) == [0, 1]
    assert "the training has ended after 2 steps in 0 epochs" in caplog.text
    assert "good enough; its checkpoint" in caplog.text
    assert train(tmp_path) == []
    assert "an earlier run has finished the training after 2 steps" in caplog.text
    assert train(tmp_path, epochs=3, breaks_after=4) == [2, 3]
    assert train(tmp_path, epochs=3) == [4, 5, 6, 7, 8]
    assert train(tmp_path, epochs=3) == []


def test_a_training_by_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It goes through as many epochs as it needs, ends in the middle of one, and goes on with more steps."""
    assert train(tmp_path, epochs=None, steps=4) == [0, 1, 2, 3]
    lines = [record.getMessage() for record in caplog.records]
    assert "training on cpu, ranks: 1, global batch: 8 samples, steps: 4, an epoch has 24 samples" in lines
    assert any(line.startswith("the training has ended after 4 steps in 1 epochs") for line in lines)
    assert train(tmp_path, epochs=None, steps=4) == []
    assert train(tmp_path, epochs=None, steps=10) == [4, 5, 6, 7, 8, 9]
    assert train(tmp_path / "fewer", epochs=1, steps=10) == [0, 1, 2]  # whatever comes first


def test_a_second_loop_is_refused_after_the_end_of_the_training() -> None:
    """It would train nothing. After ``break`` it goes on."""
    job = heterotrain.init(batch_samples=8, epochs=2)
    model = job.wrap(torch.nn.Linear(1, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    def loop(steps: int) -> list[int]:
        done: list[int] = []
        for step in job.steps(DATA):
            with step:
                for (x,) in step.micro_batches():
                    step.backward(model(x).square().mean())
                step.apply(optimizer)
            done.append(step.number)
            if len(done) == steps:
                break
        return done

    assert (loop(2), loop(9)) == ([0, 1], [2, 3, 4, 5])
    with pytest.raises(UsageError, match=r"job\.steps was called again after the end of the training"):
        loop(1)


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    """Before the model exists."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"checkpoints cannot be written to .*Not a directory"):
        train(tmp_path / "file" / "checkpoints")
