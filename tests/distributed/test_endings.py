"""A script that ends in the middle of the training is a loss for its peers at once, whatever its process still does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import Operator, assert_same_weights, reference
from heterotrain_core.contract.outcome import Ending
from support.lineage import lineage

SCRIPT = "distributed.ending_scripts:train"


@pytest.mark.parametrize("end", ["raise", "exit"])
def test_survivors_continue_while_the_failed_process_lives_on(
    operate: Callable[..., Operator], tmp_path: Path, end: str
) -> None:
    """Three train, one fails, and the two others finish before its process has ended."""
    operator = operate(epochs=2)
    workers = [operator.start(f"w{i}", script=SCRIPT, end=end if i == 2 else "") for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(6, 6, 4))
    operator.finish(workers[:2])
    assert workers[2].poll() is None
    assert not workers[2].ready()
    (tmp_path / "release").touch()
    operator.finish(workers[2:])
    assert workers[2].outcome is not None
    assert workers[2].outcome.ending is Ending.FAILED
    assert ("no such file" in workers[2].outcome.reason) == (end == "raise")
    expected, ids = reference(epochs=2)
    for worker in workers[:2]:
        assert worker.outcome is not None
        assert worker.outcome.ending is Ending.FINISHED
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids
