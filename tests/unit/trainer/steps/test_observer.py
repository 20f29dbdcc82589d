"""Which steps are measured, and what a scrape shows for the others."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.numerics.noise import Measurement
from heterotrain.session import Job
from heterotrain.steps import observer
from heterotrain.telemetry import sampling
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.config import TrainingConfig
from prometheus_client import generate_latest

STEPS = 20


@pytest.mark.parametrize("scaling", ["None", "AdaScale"])
def test_gradients_are_measured_as_often_as_the_budget_allows(monkeypatch: pytest.MonkeyPatch, scaling: str) -> None:
    """One of two in a formation's first steps, then one of four; with AdaScale, independent of any clock."""
    monkeypatch.setattr(observer, "LEARN_STEPS", 6)
    monkeypatch.setattr(sampling, "measuring_interval", lambda **_: 4)
    measured: list[int] = []
    squares = Measurement.squares

    def noted(self: Measurement, *, batch_samples: int, weight: float) -> object:
        measured.append(step.number)
        return squares(self, batch_samples=batch_samples, weight=weight)

    monkeypatch.setattr(Measurement, "squares", noted)
    job = Job(
        heterotrain.init().identity,
        TrainingConfig(epochs=1, base_batch_samples=4, learning_rate_scaling=scaling, precision="FP32"),
    )
    job._loop._attempts.cap_samples = 2  # two micro-batches are two groups, from which noise can be estimated
    model = job.wrap(torch.nn.Linear(3, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    x = torch.randn(4 * STEPS, 3, generator=torch.Generator().manual_seed(1))
    for step in job.steps(torch.utils.data.TensorDataset(x)):
        with step:
            for (part,) in step.micro_batches():
                step.backward(model(part).square().mean())
            step.apply(optimizer)
    budgeted = [step for step in range(STEPS) if sampling.is_measured(step, 2 if step < 6 else 4)]
    assert measured == (list(range(STEPS)) if scaling == "AdaScale" else budgeted)
    report = job._report  # as a scrape sees it
    found = dict(re.findall(r"^(\w+)\{[^}]*\} (\S+)$", generate_latest(report.registry).decode(), re.MULTILINE))
    assert float(found[names.STEPS]) == STEPS - 1, "each step is counted except the first, which is not typical"
    assert float(found[names.SAMPLES]) == 4 * (STEPS - 1)
    assert (float(found[names.STEP]), float(found[names.SAMPLES_COMMITTED])) == (STEPS, 4 * STEPS)
    assert float(found[names.MEASUREMENT_INTERVAL]) == 4
    assert float(found[names.TELEMETRY_SECONDS]) > 0
    assert float(found[names.GRADIENT_SQUARED]) > 0


class Pending(deque[Any]):
    """Steps whose times wait to be counted; a scrape begins while they are dropped."""

    def clear(self) -> None:
        scrape = threading.Thread(target=lambda: self.flush(wait=False))
        scrape.start()
        scrape.join()
        super().clear()

    flush: Callable[..., None]


def test_no_scrape_counts_a_step_while_it_is_dropped() -> None:
    """It would take the first of them, and find none to remove."""
    job = heterotrain.init()
    noted, looks = job._loop._observer, []
    clock = SimpleNamespace(read=lambda *_read, **_options: looks.append(1))  # the device has not finished the step
    noted._pending = Pending([(None, clock, None, 1.0, None)])
    noted._pending.flush = noted.flush
    noted.forget()
    assert looks == [1]  # before they are dropped
    assert not noted._pending
