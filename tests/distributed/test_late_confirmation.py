"""Steps that the next vote confirms, on ranks with a gate: faults at every new place leave what one process would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import late_scripts
from distributed.harness import Gate, Operator, Worker, assert_same_weights, reference
from distributed.scripts import batches, optimizer_of, problem
from heterotrain_core.contract.outcome import Ending
from support.lineage import lineage
from support.repeat import part_of

Operate = Callable[..., Operator]
STEP = 3
"""Begins while the one before waits; an epoch has six, of which the first and the last do not wait."""
PLACES = [
    ("confirming", STEP - 1),
    ("reducing", STEP),
    ("applied", STEP - 1),
    ("confirmed late", STEP - 1),
    ("launched", STEP),
    ("step", STEP),
    ("reduced", STEP),
    ("backward", STEP),
]
"""In the order of importance: before the confirmation; in the vote on the next step; after the update was queued; …"""


def finish(operator: Operator, workers: list[Worker]) -> None:
    """Fail unless these workers finish with the weights and samples of one process."""
    operator.finish(workers)
    expected, ids = reference(epochs=1)
    for worker in workers:
        assert worker.outcome is not None, operator.evidence()
        assert worker.outcome.ending is Ending.FINISHED, operator.evidence()
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids


def begin(operate: Operate, fault: dict[str, Any], *, victim: int = 2) -> tuple[Operator, list[Worker]]:
    """Start three workers, one of them with a fault."""
    operator = operate(epochs=1, peer_timeout_s=0.5)
    fault = fault | {"reached": str(operator.folder / "reached")}
    workers = [operator.start(f"w{i}", late=True, fault=fault if i == victim else None) for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers)
    return operator, workers


@pytest.mark.parametrize(("place", "step"), part_of(PLACES, of=4))
def test_a_rank_dies(operate: Operate, place: str, step: int) -> None:
    operator, workers = begin(operate, {"place": place, "step": step}, victim=len(place) % 3)
    finish(operator, [worker for number, worker in enumerate(workers) if number != len(place) % 3])
    assert (operator.folder / "reached").exists()


@pytest.mark.parametrize(("place", "step"), part_of([("gate", STEP - 1), ("reduced", STEP), ("launched", STEP)], of=3))
def test_a_false_alarm(operate: Operate, place: str, step: int) -> None:
    """All ranks live. One finds its gate closed while those of the others are open, or cannot tell."""
    operator, workers = begin(operate, {"place": place, "step": step, "do": "lose" if place != "gate" else "mark"})
    finish(operator, workers)
    assert (operator.folder / "reached").exists()


def test_a_rank_joins_while_a_step_waits(operate: Operate) -> None:
    """And another one dies before it confirms that step."""
    operator = operate(epochs=1, peer_timeout_s=0.5)
    gate = Gate(operator.folder, STEP)
    victim = {"place": "confirming", "step": STEP - 1}
    workers = [operator.start(f"w{i}", late=True, fault=gate.fault if i else victim) for i in range(2)]
    joiner = operator.start("w2", late=True)
    operator.until_ready(*workers, joiner)
    operator.plan(workers)
    operator.until(gate.reached, "a step waits")
    operator.plan([workers[1], joiner])
    gate.open()
    finish(operator, [workers[1], joiner])


def plainly(steps: int = 6) -> dict[str, torch.Tensor]:
    """Return what plain torch makes of the script that changes model and optimizer itself."""
    (x, y), model = problem(96).tensors, late_scripts.Net()
    optimizer = optimizer_of(model)
    for number, (_, chosen) in enumerate(batches(epochs=1)):
        late_scripts.before(model, number)
        optimizer.zero_grad()
        ((model(x[chosen]) - y[chosen]) ** 2).mean().backward()
        optimizer.step()
        late_scripts.after(model, optimizer)
    return {name: value.detach() for name, value in model.state_dict().items()} | {"count": torch.tensor(float(steps))}


@pytest.mark.parametrize(("first", "counts"), part_of([("reduced", False), ("reduced", True), ("gate", False)], of=3))
def test_a_script_that_changes_model_and_optimizer_itself(operate: Operate, first: str, counts: bool) -> None:  # a case
    """All ranks repeat a step, by false alarms. The first has not changed anything after it, and the others have.

    Or it finds its gate closed, as the others do.
    """
    operator = operate(epochs=1, peer_timeout_s=0.5)
    faults = [{"place": "gate", "step": STEP - 1, "do": "mark"} for _ in range(3)]
    if first != "gate":
        faults[0] = {"place": first, "step": STEP - 1, "do": "lose"}
    faults = [fault | {"reached": str(operator.folder / f"reached-{at}")} for at, fault in enumerate(faults)]
    script: Any = {"script": "distributed.late_scripts:train", "counts": counts}
    workers = [operator.start(f"w{i}", fault=fault, **script) for i, fault in enumerate(faults)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    for at, worker in enumerate(workers):
        assert (operator.folder / f"reached-{at}").exists()
        assert worker.outcome is not None, operator.evidence()
        assert worker.outcome.ending is Ending.FINISHED, operator.evidence()
        assert_same_weights(operator.weights(worker), plainly())
