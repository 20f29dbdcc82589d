"""Several loops of ``job.steps`` in one script: phases with other data, through losses, joins and resumes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import Gate, Operator, assert_same_weights, check_weights
from distributed.own_ranks import OwnRanks
from distributed.phase_scripts import FIRST, SECOND, plain

Operate = Callable[..., Operator]
SCRIPT = "distributed.phase_scripts:train"


def samples(folder: Path, name: str) -> dict[int, list[int]]:
    """Return the samples of each epoch, by the log of a rank that has seen all steps."""
    found: dict[int, dict[int, list[int]]] = {}
    for path in (folder / "samples").glob(f"{name}*"):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["epoch"], {})[line["step"]] = line["batch_ids"]
    return {epoch: sorted(number for ids in steps.values() for number in ids) for epoch, steps in found.items()}


@pytest.mark.parametrize("lost", [{"place": "reducing", "step": 3}, {"place": "between", "step": 0}])
def test_a_loss_and_a_join_in_another_phase(operate: Operate, lost: dict[str, Any]) -> None:
    """The joiner passes through the first loop without a step, and has the weights of one process in the end."""
    operator = operate()
    gate = Gate(operator.folder, 8)
    common: dict[str, Any] = {"script": SCRIPT, "phases": [{"epochs": 1}, {}]}
    workers = operator.start_workers(3, faults={0: gate.fault, 2: lost}, **common)
    operator.plan(workers, shares=(11, 0, 5), micro=(4, 0, 0))
    operator.until(gate.reached, "the survivors are in the second phase")
    operator.finish([workers[-1]])
    assert workers.pop().code == -signal.SIGKILL
    workers.append(operator.start_ready("w3", **common))
    operator.plan(workers, shares=(0, 9, 7), micro=(0, 4, 0))
    operator.until_read(workers[:2])
    gate.open()
    check_weights(operator, workers, plain(epochs=(1, 1)))
    calls = [json.loads((operator.folder / f"{worker.name}.json").read_text()) for worker in workers]
    every = ["steps 4", "epoch 0", "steps 8", "epoch 1"]
    assert every in calls[:2]
    # A rank that takes over step 3 from one that had committed it does not call that step's hook.
    assert all(called == every or (lost["step"] == 3 and called == every[1:]) for called in calls[:2])
    assert calls[2] == ["epoch 1"]
    assert samples(operator.folder, "w1") == {0: list(range(FIRST)), 1: list(range(SECOND))}


@pytest.mark.parametrize(
    "case",
    [
        ({"epochs": 3}, [{"epochs": 2}, {}], {"epochs": (2, 1)}),
        ({"steps": 13}, [{"steps": 9}, {}], {"epochs": (2, 1), "steps": (9, 4)}),
    ],
)
@pytest.mark.parametrize("world_size", [0, 2])
def test_phases_without_an_operator_and_their_resume(
    own_ranks: OwnRanks, tmp_path: Path, world_size: int, case: tuple[dict[str, int], list[Any], dict[str, Any]]
) -> None:
    """A run that fails in the second phase is continued there; one that has ended trains nothing."""
    settings, phases, expected = case
    given = {"out": str(tmp_path), "phases": phases, "batch_samples": 16, "checkpoint_uri": str(tmp_path / "kept")}
    outcomes = []
    for stop in (phases[0].get("steps", 12) + 1, None, None):
        started = own_ranks.start(SCRIPT, world_size=world_size, stop=stop, **settings, **given)
        outcomes.append([rank.ended() for rank in started])
        text = "\n".join(rank.log() for rank in started)
        assert all(code == (stop is not None) for code in outcomes[-1]), text
    assert "nothing is left to train" in text
    for rank in range(max(1, world_size)):
        assert_same_weights(dict(torch.load(tmp_path / f"rank-{rank}.pt")), plain(**expected))
