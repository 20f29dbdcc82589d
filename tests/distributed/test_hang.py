"""A rank whose own code is stuck: the others log it with its stack, and continue when it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distributed.harness import Gate, Operator, assert_finished
from heterotrain_core.contract import metrics


def test_the_stuck_rank_and_its_stack_are_named(operate: Callable[..., Operator], tmp_path: Path) -> None:
    """Two ranks wait in a reduction for the third, which is stuck in its script before backward."""
    operator = operate(peer_timeout_s=0.3)
    gate = Gate(tmp_path, 3)
    workers = operator.start_workers(3, faults={1: gate.fault}, slow_s=0.1)
    operator.plan(workers)
    for worker in (workers[0], workers[2]):
        operator.until(lambda w=worker: "code of its own" in w.log(), f"{worker.name} logs the stuck rank")  # type: ignore[misc]  # a default argument binds the loop's variable
    # What the operator reads: the two that wait say for how long, and the stuck one does not wait.
    for worker in (workers[0], workers[2]):
        operator.until(lambda w=worker: (w.metric(metrics.WAITING_SECONDS) or 0) > 1, f"{worker.name} says it waits")  # type: ignore[misc]  # a default argument binds the loop's variable
    operator.until(lambda: workers[1].metric(metrics.WAITING_SECONDS) == 0, "the stuck rank says it does not wait")
    gate.open()
    over = "the wait for gradient bucket 1 of"
    operator.until(lambda: over in workers[0].log(), "the end of the wait is logged")
    operator.finish(workers)
    log = workers[0].log()
    assert "for gradient bucket 1 of" in log
    assert "waited for: rank 1 (w1/0)\n" in log
    stack = log.partition("rank 1 (w1/0) runs code of its own, at step 3:")[2].partition("rank ")[0]
    assert "in train\n" in stack
    assert "in at\n" in stack
    assert "waited for" not in workers[1].log()
    assert_finished(operator, workers)
