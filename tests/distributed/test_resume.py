"""A stopped job continues on other workers with its whole state: weights, and all state that controls their changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import Gate, Operator
from distributed.setups import distance, twin
from distributed.test_numerics import each_once, records, start
from distributed.training_setup import TrainingSetup
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain_core.contract.outcome import Ending

EPOCHS, BATCH, WARM_UP = 4, 32, 256
STOP = 4
"""The step in which all workers get SIGTERM: in the middle of an epoch and of the learning rate's warm-up."""


@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_another_number_of_ranks_continues_with_all_state(
    operate: Callable[..., Operator], tmp_path: Path, precision: str
) -> None:
    """Three ranks leave a checkpoint and two continue.

    Checked are loss scale, rate, schedule, noise, BatchNorm's buffers and a stream's cursor.
    """
    exact = precision == "FP32"
    setup = TrainingSetup(
        batch_norm=True, decay=0.98, stream=True, **({} if exact else {"dtype": "float32", "spike": (1, 1e4)})
    )
    operator = operate(
        epochs=EPOCHS, precision=precision, learning_rate_scaling="Linear", learning_rate_warmup_samples=WARM_UP,
        checkpoint_uri=f"file://{tmp_path}/checkpoints",
    )  # fmt: skip
    gates = [Gate(tmp_path, STOP, name=f"w{i}-") for i in range(3)]
    first = start(operator, 3, setup, faults={i: gate.fault for i, gate in enumerate(gates)})
    operator.plan(first, batch_samples=BATCH, shares=(16, 9, 7))
    operator.suspend(first, *gates)
    assert [worker.outcome.ending for worker in first if worker.outcome] == [Ending.LEFT] * 3
    (folder,) = (path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    kept = CheckpointFolder(folder.as_posix(), max_to_keep=1).load_newest()
    assert kept is not None
    numerics = kept[1]["extras"]["heterotrain-numerics"]
    assert (kept[0].step, kept[1]["progress"]["cursor"]) == (STOP + 1, 64)
    assert numerics["noise"]["plain"]["weight"] > 0
    resumed = start(operator, 2, setup, prefix="r")
    operator.plan(resumed, batch_samples=BATCH, shares=(20, 12))
    operator.finish(resumed)
    found = [records(operator, worker)["steps"] for worker in resumed]
    for steps in found:
        assert steps[0]["step"] == STOP + 1
        assert steps[0]["numerics"] == json.loads(json.dumps(numerics))
        assert len({step["rate"] for step in steps}) > 3  # the warm-up continues
    assert each_once(operator, setup, EPOCHS)
    if not exact:
        assert found[0][0]["loss_scale"] < 65536.0
        return
    rates = [
        min(2.0, 1.0 + done / WARM_UP) for epoch in range(EPOCHS) for done in (90 * epoch + x for x in (0, 32, 64))
    ]
    expected = twin(
        setup, epochs=EPOCHS, batch=lambda _epoch: BATCH, rate=lambda step, *_: rates[step], schedule=lambda _: 2
    )
    for worker, steps in zip(resumed, found, strict=True):
        assert [step["rate"] for step in steps] == pytest.approx(rates[STOP + 1 :], rel=1e-12)
        assert distance(operator.weights(worker), expected.weights) < 1e-10
        assert [s["loss"] for s in steps] == pytest.approx(expected.losses[STOP + 1 :], rel=1e-10)
