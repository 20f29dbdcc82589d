"""A script that ends in the middle of the training is a loss for its peers at once, whatever its process still does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import Operator, assert_finished
from heterotrain_core.contract.outcome import Ending

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
    assert_finished(operator, workers[:2])
