"""A store that fails in the middle of a job: training goes on, and checkpoints go on when the store is back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed.harness import Gate, Operator, assert_finished
from heterotrain_core.contract import metrics

EPOCHS = 10
FAILS_AT, BACK_AT = 6, 30
"""Steps at which the store begins and ceases to fail."""


@contextmanager
def away(store: Path) -> Iterator[None]:
    """Take the store's folder away, as with a volume that is unmounted, and bring it back."""
    aside = store.with_name("aside")
    store.rename(aside)
    store.write_text("not a folder")
    yield
    store.unlink()
    aside.rename(store)


def steps_in(store: Path) -> list[int]:
    """Return the steps of all complete checkpoints."""
    paths = [path for path in store.rglob("checkpoint-*.json") if "-p" not in path.name]
    return sorted(json.loads(path.read_text())["step"] for path in paths)


def test_a_store_is_away_for_some_steps(operate: Callable[..., Operator], tmp_path: Path) -> None:
    """The job ends with the weights of an undisturbed run, and with a checkpoint from after the failure."""
    store = tmp_path / "checkpoints"
    operator = operate(epochs=EPOCHS, checkpoint_uri=f"file://{store}", checkpoint_interval_s=0.0)
    begins, ends = Gate(operator.folder, FAILS_AT, name="w0-"), Gate(operator.folder, BACK_AT, name="w1-")
    workers = operator.start_workers(2, faults={0: begins.fault, 1: ends.fault})
    operator.plan(workers)
    operator.until(begins.reached, "the store is about to fail")

    def settled() -> bool:
        """Whether the newest checkpoint is reported: one that only has old ones left to remove would not fail."""
        steps = steps_in(store)
        return bool(steps) and steps[-1] == max(worker.metric(metrics.CHECKPOINT_STEP) or -1 for worker in workers)

    operator.until(settled, "there is a checkpoint")

    def failures() -> float:
        return sum(worker.metric("heterotrain_checkpoint_failures_total") or 0.0 for worker in workers)

    with away(store):
        begins.open()
        operator.until(ends.reached, "training goes on without the store")
        operator.until(lambda: failures() > 0, "the failure is counted")
    ends.open()
    assert_finished(operator, workers, epochs=EPOCHS)
    assert steps_in(store)[-1] > BACK_AT
