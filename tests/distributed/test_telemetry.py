"""Metrics of the gradient exchange, the only source of the performance model's T_u."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distributed.harness import Operator
from distributed.test_plans import waiting
from heterotrain_core.contract import metrics as names


def test_transfer_times_of_buckets_are_exported_during_training(
    operate: Callable[..., Operator], tmp_path: Path
) -> None:
    """By the fourth step at least one transfer was timed, and all ranks export the same seconds: the least of them."""
    operator = operate()
    workers = [operator.start("w0"), operator.start("w1", fault=waiting(tmp_path, 4))]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until((tmp_path / "reached").exists, "step 4")

    def exported() -> list[tuple[float | None, float | None]]:
        return [(worker.metric(names.BUCKET_STEPS), worker.metric(names.LAST_BUCKET_SECONDS)) for worker in workers]

    operator.until(lambda: exported()[0] == exported()[1] and bool(exported()[0][0]), "both export the same values")
    seconds = exported()[0][1]
    assert seconds is not None
    assert 0.0 < seconds < 60.0
    (tmp_path / "release").touch()
    operator.finish(workers)
