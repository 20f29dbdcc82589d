"""Loops as people write them end on uneven ranks as with plain torch on whole batches, through losses and joins."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from distributed.harness import Gate, Operator, Worker
from distributed.ordinary_loops import RECIPES, alone
from distributed.setups import distance

Operate = Callable[..., Operator]
EPOCHS = 3


def started(operator: Operator, recipe: str, *, faults: dict[int, dict[str, object]]) -> list[Worker]:
    """Start three workers with uneven shares, one of them without samples."""
    workers = [
        operator.start(f"w{i}", script="distributed.ordinary_loops:train", recipe=recipe, fault=faults.get(i))
        for i in range(3)
    ]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(11, 0, 5), micro=(4, 0, 0))
    return workers


def check(operator: Operator, recipe: str, workers: list[Worker]) -> None:
    """Compare the results of all workers with plain torch."""
    expected = alone(recipe, epochs=EPOCHS)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert distance(operator.weights(worker), expected) < 1e-10, worker.name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loop_equals_plain_torch(operate: Operate, recipe: str) -> None:
    """On three ranks, one with micro-batches and one without samples."""
    operator = operate(epochs=EPOCHS)
    workers = started(operator, recipe, faults={})
    operator.finish(workers)
    check(operator, recipe, workers)


@pytest.mark.parametrize(("recipe", "epoch"), [("Plateau", 1), ("HeadSwap", 0)])
@pytest.mark.parametrize("place", ["hook", "hook end"])
@pytest.mark.parametrize("do", ["lose", "die"])
def test_state_changed_in_hooks_changes_once(operate: Operate, recipe: str, epoch: int, place: str, do: str) -> None:
    """Whether a worker is lost in the hook, or one loses a message when the others have finished or not."""
    operator = operate(epochs=EPOCHS)
    workers = started(operator, recipe, faults={2: {"place": place, "step": epoch, "do": do}})
    operator.finish(workers)
    if do == "die":
        assert workers.pop().code == -signal.SIGKILL
    check(operator, recipe, workers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loop_survives_a_loss_and_a_join(operate: Operate, recipe: str) -> None:
    """A worker is lost in the first epoch, and another joins in the second one."""
    operator = operate(epochs=EPOCHS)
    gate = Gate(operator.folder, 9)
    workers = started(operator, recipe, faults={2: {"place": "launched", "step": 3}, 0: gate.fault})
    operator.until(gate.reached, "the first worker is in the second epoch")
    assert workers.pop().poll() == -signal.SIGKILL
    workers.append(operator.start("w3", script="distributed.ordinary_loops:train", recipe=recipe))
    operator.until_ready(workers[-1])
    operator.plan(workers, shares=(3, 8, 5))
    gate.open()
    operator.finish(workers)
    check(operator, recipe, workers)


@pytest.mark.parametrize("recipe", ["Apart", "ApartAlike"])
def test_a_rank_that_trains_other_parameters_is_refused(operate: Operate, recipe: str) -> None:
    """It ends with a message before its gradients reach the others, who go on without it."""
    operator = operate(epochs=1)
    workers = started(operator, recipe, faults={})
    operator.finish(workers)
    assert [worker.code for worker in workers] == [0, 1, 0]
    last = workers[1].log().splitlines()[-1]
    assert "UsageError" in last
    assert "on every rank" in last
