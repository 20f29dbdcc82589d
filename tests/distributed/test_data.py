"""Data sets of every kind, with changes of shares and members: each sample once, and the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.data_scripts import SAMPLES, shards, stream_order
from distributed.harness import Gate, Operator, Worker, assert_finished
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.contract.plan import Boundary, BoundaryKind

SCRIPT = "distributed.data_scripts:train"
ORDERS: dict[str, Any] = {"stream": stream_order, "shards": lambda epoch: shards().ids(epoch, 0, SAMPLES)}


@pytest.mark.parametrize("kind", ["shards", "stream"])
def test_members_and_shares_change_while_data_are_read(
    operate: Callable[..., Operator], tmp_path: Path, kind: str
) -> None:
    """One worker dies, one joins, one gets SIGTERM, then all do; other workers continue in the middle of the epoch."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gates = [Gate(tmp_path, step) for step in (3, 6, 9)]
    faults = {0: gates[0].fault, 1: gates[1].fault, 2: {"place": "reducing", "step": 2}, 3: gates[2].fault}
    *first, joiner = operator.start_workers(4, faults=faults, script=SCRIPT, kind=kind)
    operator.plan(first, shares=(9, 5, 2))
    operator.until(gates[0].reached, "two are left and reach the fourth step")
    operator.plan([first[1], joiner, first[0]], shares=(3, 12, 1), micro=(2, 5, 0))
    operator.until_read(first[:2])
    gates[0].open()
    operator.suspend([first[1]], gates[1])
    operator.suspend([first[0], joiner], gates[2])
    assert joiner.outcome is not None
    assert joiner.outcome.ending is Ending.LEFT
    resumed = operator.start_workers(2, prefix="r", script=SCRIPT, kind=kind)
    operator.plan(resumed, shares=(4, 12))
    check(operator, resumed, kind)
    assert f"continuing from the checkpoint of step {joiner.outcome.step}" in "".join(w.log() for w in resumed)


@pytest.mark.parametrize("kind", ["shards", "stream"])
def test_members_and_shares_change_while_samples_are_loaded_ahead(
    operate: Callable[..., Operator], tmp_path: Path, kind: str
) -> None:
    """Samples loaded for earlier shares are discarded, and none of them is lost or repeated."""
    operator = operate(epochs=3)
    gates = [Gate(tmp_path, step) for step in (2, 9)]
    faults = {i: gate.fault for i, gate in enumerate(gates)}
    workers = operator.start_workers(2, faults=faults, script=SCRIPT, kind=kind, workers=1, slow_s=0.02)
    often = Boundary(kind=BoundaryKind.STEPS, every_steps=1)
    operator.plan(workers, shares=(9, 7), micro=(4, 0), boundary=often)
    operator.until(gates[0].reached, "two steps are committed")
    operator.plan(workers, shares=(2, 14), micro=(0, 5), boundary=often, new_generation=False)
    gates[0].open()
    operator.suspend(workers[1:], gates[1])
    check(operator, workers[:1], kind)
    assert "shares [2, 14]" in workers[0].log()


def check(operator: Operator, workers: list[Worker], kind: str) -> None:
    """Fail unless these workers finish with the weights and samples of one process that reads the data in order."""
    # Samples of a stream are identified by their positions only.
    ids = {epoch: list(range(SAMPLES)) for epoch in range(3)} if kind == "stream" else None
    assert_finished(operator, workers, epochs=3, order=ORDERS[kind], ids=ids)
