"""Checkpoints around hooks: one before hooks that may outlast the grace period, and the final one after them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import heterotrain
import pytest
import torch
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.manager import CheckpointManager
from heterotrain.identity import Identity, Mode
from heterotrain.state.training import TrainState
from heterotrain.telemetry.report import RankMetrics
from heterotrain_core.contract.config import TrainingConfig
from support.waiting import wait_until

DATA = torch.utils.data.TensorDataset(torch.ones(24, 1))


pytestmark = pytest.mark.usefixtures("own_process")


class Best:
    """A state that the hook changes."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def state_dict(self) -> dict[str, list[int]]:
        return {"epochs": list(self.epochs)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.epochs = list(state["epochs"])


def train(folder: Path, *, epochs: int, hook: Callable[[int], None]) -> Best:
    """Train with a hook that notes its epochs in a registered object; return the object."""
    job = heterotrain.init(batch_samples=8, epochs=epochs, checkpoint_uri=folder)
    model = job.wrap(torch.nn.Linear(1, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    best = job.register("best", Best())

    @job.on_epoch_end
    def _evaluate(epoch: int) -> None:
        best.epochs.append(epoch)
        hook(epoch)

    for step in job.steps(DATA):
        with step:
            for (x,) in step.micro_batches():
                step.backward(model(x).mean())
            step.apply(optimizer)
    return best


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in the folder, -1 for none."""
    return CheckpointFolder(folder, max_to_keep=1).newest_order()[1]


def test_progress_is_saved_while_a_long_hook_runs(tmp_path: Path) -> None:
    """A rank that is killed in its first hook continues with the hook, which then sees the state from before it."""
    folder, killed = tmp_path / "checkpoints", tmp_path / "killed"

    def hook(epoch: int) -> None:
        if epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # heeded after the hook and one more step
            wait_until(lambda: newest_step(folder) == 3, "the epoch is saved", timeout_s=60)
            shutil.copytree(folder, killed)  # what the store would hold after SIGKILL

    with pytest.raises(SystemExit):
        train(folder, epochs=2, hook=hook)
    state = CheckpointFolder(killed, max_to_keep=1).load_newest()
    assert state is not None
    assert (state[1]["progress"]["evaluated"], state[1]["extras"]["best"]["epochs"]) == (0, [])
    assert train(killed, epochs=2, hook=lambda _epoch: None).epochs == [0, 1]


def test_the_final_checkpoint_holds_what_the_last_hook_did(tmp_path: Path) -> None:
    """It replaces the one of the same step that was written before the hook."""

    def hook(_epoch: int) -> None:
        wait_until(lambda: newest_step(tmp_path) == 3, "the epoch is saved", timeout_s=60)

    train(tmp_path, epochs=1, hook=hook)
    folder = CheckpointFolder(tmp_path, max_to_keep=9)
    assert [manifest.hooks[1] for manifest in folder.manifests()] == [1]
    found = folder.load_newest()
    assert found is not None
    assert found[1]["extras"]["best"]["epochs"] == [0]


@pytest.mark.parametrize(
    ("hooks_s", "expected"),
    [(None, True), (1.0, False), (26.0, True), (40.0, True)],
    ids=["unknown", "short", "no time to write after it", "longer than the grace period"],
)
def test_only_hooks_that_may_outlast_the_grace_period_are_preceded_by_a_checkpoint(
    tmp_path: Path, hooks_s: float | None, expected: bool
) -> None:
    """A short hook leaves time for the checkpoint after it."""
    identity = Identity(mode=Mode.ALONE)
    config = TrainingConfig(checkpoint_uri=str(tmp_path))
    manager = CheckpointManager(identity, config, report=RankMetrics(identity))
    manager._speed_bytes_per_s = 1.0
    training = TrainState(model=torch.nn.Linear(1, 1, bias=False))  # four bytes
    assert manager.outlasts_grace(hooks_s, training, step_s=0.5, grace_s=30.0) is expected
    without = CheckpointManager(identity, TrainingConfig(), report=RankMetrics(identity))
    assert not without.outlasts_grace(hooks_s, training, step_s=0.5, grace_s=30.0), "there is nothing to save to"
