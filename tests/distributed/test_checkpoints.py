"""The job stops altogether and goes on from its checkpoint; nothing good is ever lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.harness import Gate, Operator, Worker, assert_same_weights, reference
from heterotrain.data.sample_log import lineage
from heterotrain_core.contract.outcome import Ending

Operate = Callable[..., Operator]


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Return all manifests, oldest first (beside them lie what the parts of a large state say of themselves)."""
    paths = sorted((folder / "checkpoints").rglob("checkpoint-*.json"))
    return [json.loads(path.read_text()) for path in paths if "-p" not in path.name]


def data_of(folder: Path, manifest: dict[str, Any]) -> Path:
    """Return the path of a checkpoint's data."""
    return next((folder / "checkpoints").rglob(manifest["parts"][0]["name"]))


def assert_finished(operator: Operator, workers: list[Worker], *, epochs: int) -> None:
    """Fail unless these workers finished with the weights and samples of an undisturbed run."""
    operator.finish(workers)
    expected, ids = reference(epochs=epochs)
    for worker in workers:
        assert worker.outcome is not None, worker.log()
        assert worker.outcome.ending is Ending.FINISHED
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids


def test_suspend_and_resume(operate: Operate, tmp_path: Path) -> None:
    """All workers are told to go: one of them writes a checkpoint first, and later workers go on at the very next step."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    workers = [operator.start(f"w{i}", slow_s=0.02) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until_step(workers[0], 4)
    for worker in workers:
        worker.signal(signal.SIGTERM)
    operator.finish(workers)
    assert [w.outcome.ending for w in workers if w.outcome] == [Ending.LEFT, Ending.LEFT]
    stopped = manifests(tmp_path)[-1]["step"]
    assert workers[0].outcome is not None
    assert stopped == workers[0].outcome.step
    resumed = [operator.start(f"w{i}", incarnation=1) for i in range(3)]
    operator.until_ready(*resumed)
    operator.plan(resumed, shares=(4, 10, 2))
    assert_finished(operator, resumed, epochs=3)
    assert f"continuing from the checkpoint of step {stopped}" in "".join(w.log() for w in resumed)


def test_all_are_told_but_not_all_in_time_for_one_vote(operate: Operate, tmp_path: Path) -> None:
    """One has voted already when both are told: the other takes it for a survivor, and it writes before it goes, too."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gate = Gate(tmp_path, 4)
    workers = [operator.start(f"w{i}", fault=None if i else gate.fault) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until(gate.reached, "one waits in its fifth step and the other for it")
    for worker in workers:
        worker.signal(signal.SIGTERM)
    gate.open()
    operator.finish(workers)
    assert [w.outcome.ending for w in workers if w.outcome] == [Ending.LEFT, Ending.LEFT]
    assert manifests(tmp_path)[-1]["step"] >= 5
    resumed = operator.start("r0")
    operator.until_ready(resumed)
    operator.plan([resumed])
    assert_finished(operator, [resumed], epochs=3)


def test_an_announced_leave_makes_a_survivor_write(operate: Operate, tmp_path: Path) -> None:
    """Whole spot pools vanish together, so the on-demand survivor keeps the state at once."""
    operator = operate(epochs=4, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    workers = [operator.start(f"w{i}", slow_s=0.02) for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers, on_demand=(False, True, False))
    operator.until_step(workers[0], 3)
    workers[2].signal(signal.SIGTERM)
    operator.until(lambda: bool(manifests(tmp_path)), "a checkpoint is there")
    operator.finish(workers)
    assert "checkpoint of step" in workers[1].log()
    assert "checkpoint of step" not in workers[0].log()
    assert_finished(operator, workers[:2], epochs=4)


def test_damaged_checkpoints_are_passed_over(operate: Operate, tmp_path: Path) -> None:
    """A flipped bit in the newest and a missing end in the one before it: the third newest is good and is taken."""
    operator = operate(
        epochs=1, checkpoint_uri=f"file://{tmp_path}/checkpoints", checkpoint_interval_s=0.0, checkpoint_max_to_keep=4
    )
    first = operator.start("w0", slow_s=0.02)
    operator.until_ready(first)
    operator.plan([first])
    operator.finish([first])
    found = manifests(tmp_path)
    assert len(found) == 4
    newest, torn = data_of(tmp_path, found[-1]), data_of(tmp_path, found[-2])
    flipped = bytearray(newest.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    newest.write_bytes(flipped)
    torn.write_bytes(torn.read_bytes()[:-100])
    second = operator.start("w0", incarnation=1)
    operator.until_ready(second)
    operator.plan([second])
    assert_finished(operator, [second], epochs=1)
    assert f"continuing from the checkpoint of step {found[-3]['step']}" in second.log()


def test_a_killed_job_goes_on_from_its_last_checkpoint(operate: Operate, tmp_path: Path) -> None:
    """All workers die at once in the middle of a step; the steps since the checkpoint are done over, exactly once each."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints", checkpoint_interval_s=0.0)
    fault = {"place": "reducing", "step": 9}
    workers = [operator.start(f"w{i}", fault=fault) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    assert manifests(tmp_path)
    resumed = [operator.start(f"w{i}", incarnation=1) for i in range(2)]
    operator.until_ready(*resumed)
    operator.plan(resumed)
    assert_finished(operator, resumed, epochs=3)


def test_a_survivor_that_has_to_go_while_it_waits_writes_first(operate: Operate, tmp_path: Path) -> None:
    """One of two is killed, the other waits for the operator and is told to go: its state is the only one there is."""
    operator = operate(epochs=2, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    workers = [operator.start(f"w{i}", fault={"place": "backward", "step": 5} if i == 0 else None) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers[:1])
    operator.until(lambda: "is over" in workers[1].log(), "the survivor notices")
    workers[1].signal(signal.SIGTERM)
    operator.finish(workers[1:])
    assert workers[1].outcome is not None
    assert workers[1].outcome.ending is Ending.LEFT
    resumed = operator.start("w2")
    operator.until_ready(resumed)
    operator.plan([resumed])
    assert_finished(operator, [resumed], epochs=2)
    assert "continuing from the checkpoint of step 5" in resumed.log()
