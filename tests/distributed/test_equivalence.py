"""With any shares, the weights are those of one process that trains on the global batch."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from distributed.drawn_trainings import DrawnTraining, drawn_trainings
from distributed.harness import Operator, Worker
from distributed.setups import distance, twin
from distributed.training_setup import TrainingSetup
from heterotrain_core.contract.outcome import Ending
from hypothesis import HealthCheck, Phase, given, settings
from support.lineage import lineage
from support.repeat import times

GOLDEN = Path(__file__).with_name("golden_losses.json")
"""Recorded losses of ``SETUPS[0]`` with plain torch on one process."""
SETUPS = [
    TrainingSetup(),
    TrainingSetup(tokens=True, clip_norm=1.0),
    TrainingSetup(clip_value=0.3, clip_norm=2.0, decay=0.9),
    TrainingSetup(tokens=True, adam=True),
]


def run(operator: Operator, setup: TrainingSetup, *, shares: tuple[int, ...], **plan: Any) -> list[Worker]:
    """Train with one plan to the end and return the workers, all of which have finished."""
    workers = operator.start_workers(len(shares), script="distributed.setups:train", setup=asdict(setup))
    operator.plan(workers, shares=shares, **plan)
    operator.finish(workers)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert worker.outcome is not None
        assert worker.outcome.ending is Ending.FINISHED
    return workers


def steps(operator: Operator, worker: Worker) -> list[dict[str, Any]]:
    """Return a worker's record of each step."""
    found: list[dict[str, Any]] = json.loads((operator.folder / f"{worker.name}.json").read_text())["steps"]
    return found


def vectors(rng: random.Random, count: int, total: int) -> list[tuple[int, ...]]:
    """Return random shares of three ranks, zero among them."""
    found = []
    for _ in range(count):
        a, b = sorted(rng.randint(0, total) for _ in range(2))
        found.append((a, b - a, total - b))
    return found


@pytest.mark.parametrize("seed", range(len(SETUPS)))
def test_any_shares_train_like_one_process(operate: Callable[..., Operator], seed: int) -> None:
    """Random shares that change in every step, different micro-batches on every rank, and a short last step."""
    setup, rng = SETUPS[seed], random.Random(seed)  # noqa: S311  # a seeded scenario, not a secret
    probe = tuple(vectors(rng, 5, 16))
    micro = tuple(rng.randint(0, 5) for _ in range(3))
    operator = operate()
    workers = run(operator, setup, shares=vectors(rng, 1, 16)[0], micro=micro, probe=probe, probe_steps=1)
    expected = twin(setup, epochs=2)
    for worker in workers:
        assert distance(operator.weights(worker), expected.weights) < 1e-10
        assert [s["loss"] for s in steps(operator, worker)] == pytest.approx(expected.losses, rel=1e-10)
    ids = lineage(operator.folder / "samples")
    assert all(sorted(ids[epoch]) == list(range(90)) for epoch in range(2))
    if seed == 0:
        assert expected.losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-10)


def test_the_same_run_twice_is_the_same_to_the_last_bit(operate: Callable[..., Operator], tmp_path: Path) -> None:
    """Equal plans: equal bytes of all weights and equal losses, on all ranks."""
    setup, found = TrainingSetup(adam=True, dtype="float32"), []
    for name in ("first", "second"):
        operator = operate()
        operator.folder = tmp_path / name
        operator.folder.mkdir()
        workers = run(operator, setup, shares=(7, 0, 9), micro=(2, 0, 4), probe=((4, 5, 7), (1, 15, 0)), probe_steps=2)
        found += [
            ({k: v.numpy().tobytes() for k, v in operator.weights(w).items()}, steps(operator, w)) for w in workers
        ]
    assert all(other == found[0] for other in found)


# A failure is not shrunk, because each attempt starts processes. Its message shows the whole draw.
@settings(max_examples=times(gate=7, every=60), phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(drawn=drawn_trainings())
def test_any_training_equals_one_process(
    operate: Callable[..., Operator], tmp_path: Path, drawn: DrawnTraining
) -> None:
    """Model, loss, precision, batch, shares, micro-batches, clipping, buckets, and perhaps the loss of a worker."""
    operator = operate(
        batch_samples=drawn.batch_samples, epochs=drawn.epochs, bucket_mib=drawn.bucket_mib,
        precision="BF16" if drawn.setup.autocast else "FP32",
    )  # fmt: skip
    operator.folder = tmp_path / str(len(list(tmp_path.iterdir())))
    operator.folder.mkdir()
    count = len(drawn.micro)
    faults = {count - 1: {"step": drawn.lost[0], "place": drawn.lost[1]}} if drawn.lost is not None else {}
    script = "distributed.setups:train"
    workers = operator.start_workers(count, faults=faults, script=script, setup=asdict(drawn.setup))
    first, *others = drawn.vectors
    operator.plan(workers, shares=first, micro=drawn.micro, probe=tuple(others), probe_steps=1)
    operator.finish(workers)
    if drawn.lost is not None:
        assert workers.pop().code in {0, -signal.SIGKILL}  # without a share, it has no backward pass to be lost in
    begun = {name: value.detach() for name, value in drawn.setup.model().state_dict().items()}
    expected = twin(drawn.setup, epochs=drawn.epochs, batch=lambda _epoch: drawn.batch_samples)
    moved = distance(begun, expected.weights)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert distance(operator.weights(worker), expected.weights) < drawn.tolerance * min(moved, 1.0)
        found = {step["step"]: step["loss"] for step in steps(operator, worker)}
        losses = {number: loss for number, loss in enumerate(expected.losses) if number in found}
        assert found == pytest.approx(losses, rel=drawn.tolerance)
    committed = lineage(operator.folder / "samples")
    assert all(sorted(committed[epoch]) == list(range(drawn.setup.samples)) for epoch in range(drawn.epochs))
