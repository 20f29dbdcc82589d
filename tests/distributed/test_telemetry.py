"""What ranks tell of their exchange: the performance model's T_u comes from nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distributed.harness import Operator
from distributed.test_plans import waiting
from heterotrain_core.contract import metrics as names


def test_transfers_of_buckets_are_told_while_a_job_runs(operate: Callable[..., Operator], tmp_path: Path) -> None:
    """By the fourth step at least one was timed, and every rank tells the same seconds: the least of all ranks'."""
    operator = operate()
    workers = [operator.start("w0"), operator.start("w1", fault=waiting(tmp_path, 4))]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until((tmp_path / "reached").exists, "step 4")

    def told() -> list[tuple[float | None, float | None]]:
        return [(worker.metric(names.BUCKET_STEPS), worker.metric(names.LAST_BUCKET_SECONDS)) for worker in workers]

    operator.until(lambda: told()[0] == told()[1] and bool(told()[0][0]), "both tell the same of their buckets")
    seconds = told()[0][1]
    assert seconds is not None
    assert 0.0 < seconds < 60.0
    (tmp_path / "release").touch()
    operator.finish(workers)
