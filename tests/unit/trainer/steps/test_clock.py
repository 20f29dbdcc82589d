"""Phases measure the device's work, not the host's queueing, and measuring never waits for the device."""

from __future__ import annotations

from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.exchange.timeline import CudaTimeline, HostTimeline, ReductionTimestamps, timeline_of
from heterotrain.steps.clock import Clock, Phase
from heterotrain.telemetry.report import RankMetrics, StepTimes
from prometheus_client import generate_latest


class Device:
    """A device that executes queued work later; each queued timestamp takes one second."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        self.done_s = 0.0

    def now(self) -> float:
        """Queue a timestamp."""
        self.queued_s += 1.0
        return self.queued_s

    def is_past(self, timestamp: Any) -> bool:
        """Return whether the device has reached the timestamp."""
        return bool(timestamp <= self.done_s)

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the device's seconds; fails for timestamps in the future."""
        assert self.is_past(earlier)
        assert self.is_past(later)
        return float(later - earlier)


def test_phases_add_up_over_micro_batches() -> None:
    """With two micro-batches, each phase is the sum of its spans; gamma refers to the last backward pass only."""
    device = Device()
    clock = Clock(device)
    for _ in range(2):
        loaded = clock.spent(Phase.LOAD, clock.now())
        forward = clock.spent(Phase.FORWARD, loaded)
        timestamps = ReductionTimestamps(began=device.now(), first_bucket=device.now())
        clock.last_backward = clock.spent(Phase.BACKWARD, forward)
    clock.spent(Phase.UPDATE, clock.spent(Phase.SYNC, clock.now()))
    assert clock.read(timestamps, step_s=20.0) is None
    device.done_s = device.queued_s
    assert clock.read(timestamps, step_s=20.0) == StepTimes(
        load_s=2.0, forward_s=2.0, backward_s=6.0, sync_s=1.0, update_s=1.0, step_s=20.0, first_bucket_ratio=0.5
    )


def test_a_step_without_samples_has_no_gamma() -> None:
    """Nothing was computed, so the first bucket's time is unknown."""
    clock = Clock(HostTimeline())
    clock.spent(Phase.SYNC, clock.now())
    times = clock.read(ReductionTimestamps(), step_s=1.0)
    assert times is not None
    assert times.first_bucket_ratio is None


def test_a_device_that_lags_is_read_when_it_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update still runs at the commit, so a scrape then shows the steps before, in the device's own seconds."""
    device = Device()
    monkeypatch.setattr("heterotrain.exchange.flat.reducer.timeline_of", lambda _device: device)
    found: list[StepTimes] = []
    monkeypatch.setattr(RankMetrics, "step", lambda _self, **facts: found.append(facts["times"]))
    reports: list[RankMetrics] = []
    begin = RankMetrics.__init__
    monkeypatch.setattr(RankMetrics, "__init__", lambda self, who: (begin(self, who), reports.append(self))[0])
    job = heterotrain.init(epochs=1, batch_samples=4)
    model = job.wrap(torch.nn.Linear(1, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    counts = []
    for step in job.steps(torch.utils.data.TensorDataset(torch.ones(20, 1))):
        with step:
            for (x,) in step.micro_batches():
                step.backward(model(x).mean())
            device.done_s = device.queued_s  # as when the reduction is waited for
            step.apply(optimizer)
        generate_latest(reports[-1].registry)
        counts.append(len(found))
    assert counts == [0, 0, 1, 2, 3], "the first step is not typical, and the last one's update still runs"
    assert {(times.load_s, times.forward_s, times.sync_s, times.update_s) for times in found} == {(2.0, 1.0, 1.0, 1.0)}


def test_each_device_has_its_timeline() -> None:
    """CUDA uses events, everything else the host's clock."""
    assert isinstance(timeline_of(torch.device("cuda", 0)), CudaTimeline)
    timeline = timeline_of(torch.device("cpu"))
    first, second = timeline.now(), timeline.now()
    assert timeline.is_past(second)
    assert timeline.seconds(first, second) >= 0
