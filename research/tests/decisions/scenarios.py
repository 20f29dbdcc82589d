"""Small scenarios for tests."""

from __future__ import annotations

from typing import Any

from heterotrain_simulator.buckets import Network
from heterotrain_simulator.scenario import Group, Noise, Scenario
from heterotrain_simulator.workloads import TWO_THIRDS, Workload

FAST = 1.0e-3
SLOW = 4.0e-3


def a_workload(**changes: Any) -> Workload:
    """A workload with linear step times: 1 ms and 4 ms per sample, 10 ms fixed, memory for 400 samples."""
    fields: dict[str, Any] = {
        "name": "lines",
        "what": "straight lines",
        "source": "made up for tests",
        "step_ms": {"fast": ((1, 11.0), (400, 410.0)), "slow": ((1, 14.0), (400, 1610.0))},
        "backward_part": TWO_THIRDS,
        "gradient_bytes": 20e6,
        "epoch_samples": 20_000,
        "base_batch": 100,
        "most_batch": 800,
        "noise": ((0.0, 100.0), (1000.0, 10_000.0)),
        "target": "a thousand steps",
        "target_steps": 1000.0,
        "restart_s": 30.0,
        **changes,
    }
    return Workload(**fields)


def a_scenario(**changes: Any) -> Scenario:
    """Two fast and two slow workers on a fast network, 400 samples a step, two epochs of 50 steps."""
    fields: dict[str, Any] = {
        "name": "test",
        "workload": a_workload(),
        "groups": (
            Group(pool="fast", gpu="fast", count=2, price_per_hour=4.0),
            Group(pool="slow", gpu="slow", count=2, price_per_hour=1.0),
        ),
        "network": Network(bytes_per_s=10e9),
        "noise": Noise(variation=0.03),
        "batch_samples": 400,
        "end_epochs": 2,
        **changes,
    }
    return Scenario(**fields)
