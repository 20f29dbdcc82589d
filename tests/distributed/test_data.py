"""Data sets of every kind, with changes of shares and members: each sample once, and the weights of one process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.data_scripts import SAMPLES, shards, stream_order
from distributed.harness import Gate, Operator, Worker, assert_same_weights, reference
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.contract.plan import Boundary, BoundaryKind
from support.lineage import lineage

SCRIPT = "distributed.data_scripts:train"
ORDERS: dict[str, Any] = {"stream": stream_order, "shards": lambda epoch: shards().ids(epoch, 0, SAMPLES)}


@pytest.mark.parametrize("kind", ["shards", "stream"])
def test_members_and_shares_change_while_data_are_read(
    operate: Callable[..., Operator], tmp_path: Path, kind: str
) -> None:
    """One worker dies, one joins, one gets SIGTERM, then all do; other workers continue in the middle of the epoch."""
    operator = operate(epochs=3, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gates = [Gate(tmp_path, step) for step in (3, 6, 9)]
    faults = [gates[0].fault, gates[1].fault, {"place": "reducing", "step": 2}]
    first = [operator.start(f"w{i}", script=SCRIPT, kind=kind, fault=faults[i]) for i in range(3)]
    joiner = operator.start("w3", script=SCRIPT, kind=kind, fault=gates[2].fault)
    operator.until_ready(*first, joiner)
    operator.plan(first, shares=(9, 5, 2))
    operator.until(gates[0].reached, "two are left and reach the fourth step")
    operator.plan([first[1], joiner, first[0]], shares=(3, 12, 1), micro=(2, 5, 0))
    operator.until(lambda: all("plan 2." in worker.log() for worker in first[:2]), "both have the plan")
    gates[0].open()
    operator.until(gates[1].reached, "the joiner takes part")
    first[1].signal(signal.SIGTERM)
    gates[1].open()
    operator.finish(first[1:2])
    operator.until(gates[2].reached, "the two others continue")
    for worker in (first[0], joiner):
        worker.signal(signal.SIGTERM)
    gates[2].open()
    operator.finish([first[0], joiner])
    assert joiner.outcome is not None
    assert joiner.outcome.ending is Ending.LEFT
    resumed = [operator.start(f"r{i}", script=SCRIPT, kind=kind) for i in range(2)]
    operator.until_ready(*resumed)
    operator.plan(resumed, shares=(4, 12))
    assert_finished(operator, resumed, kind)
    assert f"continuing from the checkpoint of step {joiner.outcome.step}" in "".join(w.log() for w in resumed)


@pytest.mark.parametrize("kind", ["shards", "stream"])
def test_members_and_shares_change_while_samples_are_loaded_ahead(
    operate: Callable[..., Operator], tmp_path: Path, kind: str
) -> None:
    """Samples loaded for earlier shares are discarded, and none of them is lost or repeated."""
    operator = operate(epochs=3)
    gates = [Gate(tmp_path, step) for step in (2, 9)]
    workers = [
        operator.start(f"w{i}", script=SCRIPT, kind=kind, workers=1, slow_s=0.02, fault=gates[i].fault)
        for i in range(2)
    ]
    operator.until_ready(*workers)
    often = Boundary(kind=BoundaryKind.STEPS, every_steps=1)
    operator.plan(workers, shares=(9, 7), micro=(4, 0), boundary=often)
    operator.until(gates[0].reached, "two steps are committed")
    operator.plan(workers, shares=(2, 14), micro=(0, 5), boundary=often, new_generation=False)
    gates[0].open()
    operator.until(gates[1].reached, "steps are taken with other shares")
    workers[1].signal(signal.SIGTERM)
    gates[1].open()
    operator.finish(workers[1:])
    assert_finished(operator, workers[:1], kind)
    assert "shares [2, 14]" in workers[0].log()


def assert_finished(operator: Operator, workers: list[Worker], kind: str) -> None:
    """Fail unless these workers finished with the weights and samples of one process that reads the data in order."""
    operator.finish(workers)
    expected, ids = reference(epochs=3, order=ORDERS[kind])
    if kind == "stream":  # its samples are identified by their positions only
        ids = {epoch: list(range(SAMPLES)) for epoch in ids}
    for worker in workers:
        assert worker.outcome is not None, worker.log()
        assert worker.outcome.ending is Ending.FINISHED, worker.log()
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids
