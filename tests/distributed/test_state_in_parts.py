"""All ranks write a large state together, and any number of ranks can read it; survivors need no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import Gate, Operator, assert_finished
from distributed.test_checkpoints import manifests
from support.repeat import part_of

Operate = Callable[..., Operator]
SCRIPT = "distributed.data_scripts:train"


def test_all_leave_and_others_read_the_parts(operate: Operate, tmp_path: Path) -> None:
    """When all get SIGTERM, three ranks write a third each; two others continue at the next step."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gates = [Gate(tmp_path, 4, name=f"w{i}-") for i in range(3)]
    faults = {i: gate.fault for i, gate in enumerate(gates)}
    workers = operator.start_workers(3, faults=faults, script=SCRIPT, in_parts=True)
    operator.plan(workers)
    operator.suspend(workers, *gates)
    last = manifests(tmp_path)[-1]
    assert workers[0].outcome is not None
    assert last["step"] == workers[0].outcome.step
    assert len(last["parts"]) == 3
    resumed = operator.start_workers(2, prefix="r", script=SCRIPT, in_parts=True)
    operator.plan(resumed, shares=(6, 10))
    assert_finished(operator, resumed, epochs=3)
    final = manifests(tmp_path)[-1]
    assert (final["step"], len(final["parts"])) == (18, 2)
    record = json.loads(next((tmp_path / "checkpoints").rglob("reproducibility.json")).read_text())
    assert [plan["shares"] for plan in record["plans"]] == [[6, 5, 5], [6, 10]]
    assert record["plans"][1]["from_step"] == last["step"]


def test_a_rank_is_lost_while_parts_are_written(operate: Operate, tmp_path: Path) -> None:
    """An incomplete set of parts is not a checkpoint; the survivors write their own, and later workers read these."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints", checkpoint_interval_s=0.0)
    fault = {"place": "reducing", "step": 6}
    workers = operator.start_workers(3, faults={2: fault}, script=SCRIPT, in_parts=True)
    operator.plan(workers)
    assert_finished(operator, workers[:2], epochs=3)
    newest = manifests(tmp_path)[-1]
    assert (newest["step"], len(newest["parts"])) == (18, 2)
    later = operator.start_ready("r0", script=SCRIPT, in_parts=True)
    operator.plan([later])
    assert_finished(operator, [later], epochs=3)
    assert "continuing from the checkpoint of step 18" in later.log()


def test_a_folder_that_other_workers_do_not_see(operate: Operate) -> None:
    """After missing parts once, one rank writes everything without further waits, and training never stops."""
    operator = operate(epochs=3, checkpoint_uri="here", checkpoint_interval_s=0.0)
    workers = operator.start_workers(2, script=SCRIPT, in_parts=True, unshared=True, slow_s=0.05)
    operator.plan(workers)
    assert_finished(operator, workers, epochs=3)
    assert "from now on one rank writes everything" in workers[0].log()
    written = [json.loads(path.read_text()) for path in workers[0].folder.rglob("here/*/checkpoint-*.json")]
    whole = [manifest for manifest in written if "parts" in manifest]
    assert whole
    assert {len(manifest["parts"]) for manifest in whole} == {1}


@pytest.mark.parametrize("place", part_of(["step", "launched", "backward", "reducing", "reduced", "applied"], of=3))
def test_the_last_survivor_holds_the_state(operate: Operate, place: str) -> None:
    """Two of three die at once at any place of a step, without a checkpoint: the third has the whole state."""
    operator = operate(epochs=2, checkpoint_uri=None)
    fault = {"place": place, "step": 5}
    workers = operator.start_workers(3, faults={1: fault, 2: fault}, script=SCRIPT)
    operator.plan(workers, shares=(3, 6, 7))
    operator.finish(workers[1:])
    newcomer = operator.start_ready("w3", script=SCRIPT)
    operator.plan([newcomer, workers[0]], shares=(12, 4))
    assert_finished(operator, [newcomer, workers[0]])
