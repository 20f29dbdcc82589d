"""Loops as people write them end on uneven ranks as with plain torch on whole batches, through losses and joins."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.harness import Gate, Operator, Worker
from distributed.ordinary_loops import RECIPES, TOLERANCES, alone
from distributed.own_ranks import OwnRanks
from distributed.refused_loops import REFUSED
from distributed.setups import distance
from support.repeat import part_of

Operate = Callable[..., Operator]
SCRIPT = "distributed.ordinary_loops:train"
EPOCHS = 3


def started(operator: Operator, recipe: str, *, faults: dict[int, dict[str, object]]) -> list[Worker]:
    """Start three workers with uneven shares, one of them without samples."""
    workers = operator.start_workers(3, faults=faults, script=SCRIPT, recipe=recipe)
    operator.plan(workers, shares=(11, 0, 5), micro=(4, 0, 0))
    return workers


def check(operator: Operator, recipe: str, workers: list[Worker]) -> None:
    """Compare the results of all workers with plain torch."""
    expected = alone(recipe, epochs=EPOCHS)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert distance(operator.weights(worker), expected) < TOLERANCES.get(recipe, 1e-10), worker.name


@pytest.mark.parametrize("recipe", part_of(RECIPES, of=3))
def test_a_loop_equals_plain_torch(operate: Operate, recipe: str) -> None:
    """On three ranks, one with micro-batches and one without samples."""
    operator = operate(epochs=EPOCHS)
    workers = started(operator, recipe, faults={})
    operator.finish(workers)
    check(operator, recipe, workers)


@pytest.mark.parametrize("recipe", part_of([*RECIPES][2:] + [*RECIPES][:2], of=3))
def test_a_loop_runs_alone_and_under_torchrun(own_ranks: OwnRanks, tmp_path: Path, recipe: str) -> None:
    """The same script, without a worker pod around it, ends as with plain torch."""
    arguments = {"out": str(tmp_path), "recipe": recipe, "epochs": EPOCHS}
    for ranks in (0, 3):
        for rank in own_ranks.start(SCRIPT, world_size=ranks, **arguments):
            assert rank.ended() == 0, rank.log()
    expected = alone(recipe, epochs=EPOCHS)
    for name in ("alone", 0, 1, 2):
        assert distance(torch.load(tmp_path / f"{recipe}-{name}.pt"), expected) < TOLERANCES.get(recipe, 1e-10), name


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


@pytest.mark.parametrize("recipe", part_of([*RECIPES][1:] + [*RECIPES][:1], of=3))
def test_a_loop_survives_a_loss_and_a_join(operate: Operate, recipe: str) -> None:
    """A worker is lost in the first epoch, and another joins in the second one."""
    operator = operate(epochs=EPOCHS)
    gate = Gate(operator.folder, 9)
    workers = started(operator, recipe, faults={2: {"place": "launched", "step": 3}, 0: gate.fault})
    operator.until(gate.reached, "the first worker is in the second epoch")
    assert workers.pop().poll() == -signal.SIGKILL
    workers.append(operator.start_ready("w3", script=SCRIPT, recipe=recipe))
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


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_habit_that_cannot_work_ends_with_its_sentence(own_ranks: OwnRanks, ranks: int) -> None:
    """Alone and under torchrun, where the rank that fails first may keep others from coming as far."""
    script = "distributed.refused_loops:train"
    running = {habit: own_ranks.start(script, world_size=ranks, out="", habit=habit) for habit in REFUSED}
    for habit, started in running.items():
        assert [rank.ended() for rank in started] == [1] * len(started), started[0].log()
        check_sentence(habit, [rank.log() for rank in started])


def test_a_habit_that_cannot_work_ends_workers_with_its_sentence(operate: Operate) -> None:
    """One rank after the other. The last one may wait for the operator, which finds the reason in the others' ends."""
    operator = operate(epochs=1)
    running = {
        habit: [operator.start(f"{habit}-{i}", script="distributed.refused_loops:train", habit=habit) for i in range(3)]
        for habit in REFUSED
    }
    for workers in running.values():
        operator.plan(workers)
    for habit, workers in running.items():
        for worker in workers:
            operator.until(
                lambda worker=worker: worker.poll() == 1 or "waiting for the operator" in worker.log(),  # type: ignore[misc]  # a default argument binds the loop's variable
                f"{worker.name} ends",
            )
        check_sentence(habit, [worker.log() for worker in workers if worker.poll() == 1])


def check_sentence(habit: str, outputs: list[str]) -> None:
    """Fail unless a rank has ended with the habit's sentence, as its last line."""
    last = [output.rstrip().splitlines()[-1] for output in outputs]
    assert any("UsageError: " in line and REFUSED[habit][1] in line for line in last), "\n".join(outputs)
