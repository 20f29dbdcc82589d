"""TensorBoard files of a job that loses its lowest rank, read as TensorBoard reads them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import Operator, reference
from distributed.scripts import batches, net, optimizer_of, problem
from tensorboard.compat.proto import event_pb2


def events_of(path: Path) -> Iterator[Any]:
    """Yield a file's events: length, its checksum, the message, its checksum (TensorFlow's record format)."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        at += 12 + length + 4


def read(folder: Path) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Return curves by tag and step, and texts; a file's start drops older values of its first and later steps."""
    curves: dict[str, dict[int, float]] = {}
    texts: list[str] = []
    for path in sorted(folder.iterdir()):
        for event in events_of(path):
            if event.HasField("session_log"):
                curves = {tag: {s: v for s, v in row.items() if s < event.step} for tag, row in curves.items()}
            for value in event.summary.value:
                if value.HasField("tensor"):
                    texts.append(value.tensor.string_val[0].decode())
                else:
                    curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves, texts


def losses(*, epochs: int) -> dict[int, float]:
    """Return each step's loss over the global batch, from plain torch."""
    dataset, model, found = problem(96), net(), {}
    optimizer = optimizer_of(model)
    x, y = dataset.tensors
    for _, chosen in batches(epochs=epochs):
        optimizer.zero_grad()
        loss = ((model(x[chosen]) - y[chosen]) ** 2).mean()
        loss.backward()
        optimizer.step()
        found[len(found) + 1] = float(loss.detach())
    return found


def test_the_files_survive_the_loss_of_their_writer(operate: Callable[..., Operator], tmp_path: Path) -> None:
    """Every step's loss appears once, also after the change of the writer, and a text describes the change."""
    operator = operate()
    folder = str(tmp_path / "tensorboard")
    fault = {"place": "step", "step": 4}  # before its reduction: no rank can commit the step without it
    workers = operator.start_workers(3, faults={0: fault}, tensorboard_dir=folder, slow_s=0.02)
    operator.plan(workers, shares=(8, 6, 2))
    operator.finish(workers)
    assert [worker.code for worker in workers[1:]] == [0, 0], operator.evidence()
    curves, texts = read(tmp_path / "tensorboard" / "default-test-job-uid")
    survivors = {step: value for step, value in curves["train/loss"].items() if step > 4}
    expected = losses(epochs=2)
    assert survivors == pytest.approx({step: loss for step, loss in expected.items() if step > 4}, rel=1e-6)
    assert all(rate == pytest.approx(0.02) for rate in curves["train/learning_rate"].values())
    assert curves["share_samples/w1/0"][12] + curves["share_samples/w2/0"][12] == 16
    assert "formation 1.1: w1/0, w2/0" in texts
    torch.testing.assert_close(operator.weights(workers[1]), reference(epochs=2)[0])
