"""Loops as people write them end on uneven ranks as with plain torch on whole batches, through losses and joins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from distributed.harness import Operator, Worker
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
