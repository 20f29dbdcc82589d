"""Metrics of the gradient exchange, the only source of the performance model's T_u."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distributed.harness import Gate, Operator
from heterotrain_core.contract import metrics as names


def test_transfer_times_of_buckets_are_exported_during_training(
    operate: Callable[..., Operator], tmp_path: Path
) -> None:
    """By the fourth step at least one transfer was timed, and all ranks export the same seconds: the least of them."""
    operator, gate = operate(), Gate(tmp_path, 4)
    workers = operator.start_workers(2, faults={1: gate.fault})
    operator.plan(workers)
    operator.until(gate.reached, "step 4")

    def exported() -> list[tuple[float | None, float | None]]:
        return [(worker.metric(names.BUCKET_STEPS), worker.metric(names.LAST_BUCKET_SECONDS)) for worker in workers]

    operator.until(lambda: exported()[0] == exported()[1] and bool(exported()[0][0]), "both export the same values")
    seconds = exported()[0][1]
    assert seconds is not None
    assert 0.0 < seconds < 60.0
    gate.open()
    operator.finish(workers)
