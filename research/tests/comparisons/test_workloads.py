"""Transcribed figures are complete, and the traces have their published statistics."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from heterotrain_core.contract import metrics
from heterotrain_simulator.convergence import gain, noise_scale
from heterotrain_simulator.counters import SimulatedTelemetry
from heterotrain_simulator.ground_truth import Times
from heterotrain_simulator.spot_traces import P3, TRACES, as_changes
from heterotrain_simulator.workloads import CIFAR10, OPT_350M, PRICES_PER_HOUR, WORKLOADS


def test_every_table_is_ordered() -> None:
    """Samples grow, seconds are positive, and the base batch lies within the batches."""
    for workload in WORKLOADS.values():
        for gpu, points in workload.step_ms.items():
            assert all(a < b for (a, _), (b, _) in pairwise(points)), (workload.name, gpu)
            assert all(ms > 0 for _, ms in points)
        assert 0 < workload.base_batch <= workload.most_batch <= workload.epoch_samples
        assert all(a < b for (a, _), (b, _) in pairwise(workload.noise))
    gpus = {gpu for workload in WORKLOADS.values() for gpu in workload.step_ms}
    assert set(PRICES_PER_HOUR) <= gpus


def test_published_values_are_transcribed() -> None:
    """Two values, checked again at their source."""
    assert dict(CIFAR10.step_ms["a100"])[4096] == 406.8
    assert dict(OPT_350M.step_ms["v100"])[4] == 768 + 1842


def test_the_traces_have_their_published_statistics() -> None:
    """p3: 177 nodes added, 167 removed, at most 32, 24.0 in the mean, 162 changes after the start in 11.4 hours."""
    assert sum(minute.added for minute in P3.minutes) == 177
    assert sum(minute.removed for minute in P3.minutes) == 167
    assert P3.peak == 32
    assert P3.mean_nodes == pytest.approx(24.0, abs=0.1)
    assert len(P3.minutes) == 163
    assert sum(minute.removed >= 2 for minute in P3.minutes) == 40
    assert max(minute.removed for minute in P3.minutes) == 6
    assert P3.end_s / 3600 == pytest.approx(11.4, abs=0.05)
    assert TRACES["g4dn"].peak == 24


def test_a_trace_as_changes() -> None:
    """Each minute becomes a change of the pool, and no more nodes are lost than there are."""
    changes = as_changes(P3, "spot")
    assert sum(change.joined for change in changes) - sum(change.lost for change in changes) == 10
    nodes = 0
    for change in changes:
        nodes += change.joined - change.lost
        assert nodes >= 0


def test_the_noise_scale_interpolates_its_points() -> None:
    """At a recorded progress it is the recorded value; before and after, the nearest one; in between, interpolated."""
    assert noise_scale(CIFAR10, 4297) == pytest.approx(992)
    assert noise_scale(CIFAR10, 0) == 72
    assert noise_scale(CIFAR10, 1e9) == 17_071
    assert 992 < noise_scale(CIFAR10, 6000) < 2214


def test_the_gain_of_a_step() -> None:
    """One at the base batch; B / B_0 where noise dominates; at most (phi + B_0) / B_0 where it does not."""
    assert gain(128, base_batch=128, noise_samples=500.0) == pytest.approx(1.0)
    assert gain(1024, base_batch=128, noise_samples=1e12) == pytest.approx(8.0)
    assert gain(10**9, base_batch=128, noise_samples=1280.0) == pytest.approx(11.0, rel=1e-3)
    assert gain(256, base_batch=128, noise_samples=float("inf")) == 2.0


def test_telemetry_keeps_as_many_shapes_as_the_contract_says() -> None:
    """The oldest shape goes first, and its steps since the last scrape are lost, as in the trainer."""
    telemetry = SimulatedTelemetry()
    times = Times(forward_s=0.1, backward_s=0.2, last_backward_s=0.2, micro_batches=1)
    for share in range(1, metrics.MAX_LIVE_SHAPES + 3):
        telemetry.record(
            "a", share=share, micro_batch=share, times=times, factor_N=np.ones(2), finish_N=np.full(2, 0.4),
            fraction_N=np.full(2, 0.15), bucket_s=(0.05, 0.01),
        )  # fmt: skip
    found = telemetry.scrape(1.0)
    assert {o.share_samples for o in found} == set(range(3, metrics.MAX_LIVE_SHAPES + 3))
    assert found[0].compute is not None
    assert found[0].compute.mean == pytest.approx(0.3)
    assert found[0].sync is not None
    assert found[0].sync.mean == pytest.approx(0.1)
    assert telemetry.scrape(2.0) == ()
