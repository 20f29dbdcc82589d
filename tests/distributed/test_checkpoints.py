"""The whole job stops and continues from its checkpoint, without losing committed work."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.harness import Gate, Operator, assert_finished
from heterotrain_core.contract.outcome import Ending

Operate = Callable[..., Operator]


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Return all manifests, oldest first, without the descriptions of single parts in the same folder."""
    paths = sorted((folder / "checkpoints").rglob("checkpoint-*.json"))
    return [json.loads(path.read_text()) for path in paths if "-p" not in path.name]


def data_of(folder: Path, manifest: dict[str, Any]) -> Path:
    """Return the path of a checkpoint's data."""
    return next((folder / "checkpoints").rglob(manifest["parts"][0]["name"]))


def test_suspend_and_resume(operate: Operate, tmp_path: Path) -> None:
    """All workers get SIGTERM: one of them writes a checkpoint first, and later workers continue at the next step."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gates = [Gate(tmp_path, 4, name=f"w{i}-") for i in range(2)]
    workers = operator.start_workers(2, faults={i: gate.fault for i, gate in enumerate(gates)})
    operator.plan(workers)
    operator.suspend(workers, *gates)
    assert [w.outcome.ending for w in workers if w.outcome] == [Ending.LEFT, Ending.LEFT]
    stopped = manifests(tmp_path)[-1]["step"]
    assert workers[0].outcome is not None
    assert stopped == workers[0].outcome.step
    assert max(w.outcome.checkpoint_step or 0 for w in workers if w.outcome) == stopped
    resumed = operator.start_workers(3, incarnation=1)
    operator.plan(resumed, shares=(4, 10, 2))
    assert_finished(operator, resumed, epochs=3)
    assert f"continuing from the checkpoint of step {stopped}" in "".join(w.log() for w in resumed)


def test_a_plan_asks_for_a_checkpoint(operate: Operate, tmp_path: Path) -> None:
    """One worker reads the request: the writer writes at the next step, once, far from any boundary."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gates = [Gate(tmp_path, 2, name=f"w{i}-") for i in range(2)]
    workers = operator.start_workers(2, faults={i: gate.fault for i, gate in enumerate(gates)})
    operator.plan(workers)
    operator.until(lambda: all(gate.reached() for gate in gates), "two steps are committed")
    operator.plan(workers, to=[workers[1]], new_generation=False, shares=(10, 6), checkpoint_request="now")
    operator.until_read([workers[1]])
    for gate in gates:
        gate.open()
    assert_finished(operator, workers, epochs=3)
    steps = [each["step"] for each in manifests(tmp_path)]
    steps = [step for step in steps if step != 6]  # before the first hooks, unless the store is still busy with step 3
    assert steps == [3, 18]


def test_all_get_sigterm_but_not_all_in_time_for_one_vote(operate: Operate, tmp_path: Path) -> None:
    """One has already voted when both get SIGTERM: it counts as a survivor, and it also writes before it leaves."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gate = Gate(tmp_path, 4)
    workers = operator.start_workers(2, faults={0: gate.fault})
    operator.plan(workers)
    operator.suspend(workers, gate)  # one worker is at the gate in its fifth step, and the other waits for it
    assert [w.outcome.ending for w in workers if w.outcome] == [Ending.LEFT, Ending.LEFT]
    assert manifests(tmp_path)[-1]["step"] >= 5
    resumed = operator.start_ready("r0")
    operator.plan([resumed])
    assert_finished(operator, [resumed], epochs=3)


def test_an_announced_leave_makes_a_survivor_write(operate: Operate, tmp_path: Path) -> None:
    """Whole spot pools vanish together, so the on-demand survivor saves the state at once."""
    operator = operate(epochs=4, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gate = Gate(tmp_path, 4)
    workers = operator.start_workers(3, faults={0: gate.fault})
    operator.plan(workers, on_demand=(False, True, False))
    operator.until(gate.reached, "four steps are committed")
    workers[2].signal(signal.SIGTERM)
    gate.open()
    operator.until(lambda: bool(manifests(tmp_path)), "a checkpoint is there")
    operator.finish(workers)
    assert "checkpoint of step" in workers[1].log()
    assert "checkpoint of step" not in workers[0].log()
    assert_finished(operator, workers[:2], epochs=4)


def test_damaged_checkpoints_are_skipped(operate: Operate, tmp_path: Path) -> None:
    """With a flipped bit in the newest checkpoint and a truncated second one, the third is restored."""
    operator = operate(
        epochs=1, checkpoint_uri=f"file://{tmp_path}/checkpoints", checkpoint_interval_s=0.0, checkpoint_max_to_keep=4
    )
    first = operator.start_ready("w0", slow_s=0.2)  # most writes end within a step
    operator.plan([first])
    operator.finish([first])
    found = manifests(tmp_path)
    assert len(found) in (3, 4)
    newest, torn = data_of(tmp_path, found[-1]), data_of(tmp_path, found[-2])
    flipped = bytearray(newest.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    newest.write_bytes(flipped)
    torn.write_bytes(torn.read_bytes()[:-100])
    second = operator.start_ready("w0", incarnation=1)
    operator.plan([second])
    assert_finished(operator, [second], epochs=1)
    assert f"continuing from the checkpoint of step {found[-3]['step']}" in second.log()


def test_a_killed_job_continues_from_its_last_checkpoint(operate: Operate, tmp_path: Path) -> None:
    """All workers are killed within one step; the steps since the checkpoint are repeated, exactly once each."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints", checkpoint_interval_s=0.0)
    fault = {"place": "reducing", "step": 9}
    workers = operator.start_workers(2, faults={0: fault, 1: fault}, slow_s=0.1)  # one write ends within nine steps
    operator.plan(workers)
    operator.finish(workers)
    assert manifests(tmp_path)
    resumed = operator.start_workers(2, incarnation=1)
    operator.plan(resumed)
    assert_finished(operator, resumed, epochs=3)


def test_a_waiting_survivor_writes_a_checkpoint_before_it_leaves(operate: Operate, tmp_path: Path) -> None:
    """One of two is killed, and the other gets SIGTERM while it waits for the operator: it holds the only state."""
    operator = operate(epochs=2, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    workers = operator.start_workers(2, faults={0: {"place": "step", "step": 5}})
    operator.plan(workers)
    operator.finish(workers[:1])
    operator.until(lambda: "is over" in workers[1].log(), "the survivor notices")
    workers[1].signal(signal.SIGTERM)
    operator.finish(workers[1:])
    assert workers[1].outcome is not None
    assert workers[1].outcome.ending is Ending.LEFT
    resumed = operator.start_ready("w2")
    operator.plan([resumed])
    assert_finished(operator, [resumed], epochs=2)
    assert "continuing from the checkpoint of step 5" in resumed.log()
