"""Jobs of one epoch, as language models train, with default boundaries: faster than plain DDP from the start."""

from __future__ import annotations

import pytest
from heterotrain_simulator.baselines import Even
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.heterotrain_policy import HeterotrainPolicy
from heterotrain_simulator.result import RunResult
from heterotrain_simulator.scenario import Group, Scenario
from heterotrain_simulator.workloads import WORKLOADS
from support.repeat import times

JOBS = [
    ("bert", {"a100": 2, "rtx2080ti": 6, "t4": 8}, 384, 0.45),
    ("bert", {"a100": 4, "v100": 4, "rtx6000": 8}, 384, 0.14),
    ("opt-350m", {"a100-40": 2, "v100": 4, "titan-rtx": 2}, 256, 0.30),
    ("bert", {"v100": 8}, 384, -0.01),
]
MINUTE_S = 60.0


def samples_until(end_s: float, run: RunResult) -> float:
    """Return committed samples until a time, in proportion within a period."""
    parts = [
        row.steps * row.batch_samples * max(0.0, min(1.0, (end_s - row.from_s) / (row.until_s - row.from_s)))
        for row in run.periods
    ]
    return sum(parts)


@pytest.mark.parametrize(("workload", "gpus", "batch", "saved"), JOBS)
@pytest.mark.parametrize("seed", range(times(gate=1, every=5)))
def test_a_job_of_one_epoch_is_faster_than_even_shares(
    workload: str, gpus: dict[str, int], batch: int, saved: float, seed: int
) -> None:
    """Equal workers lose nothing: no step varies shares to learn speeds."""
    scenario = Scenario(
        name=workload,
        workload=WORKLOADS[workload],
        groups=tuple(Group(pool=gpu, gpu=gpu, count=count) for gpu, count in gpus.items()),
        network=Network(bytes_per_s=2.5e9, latency_s=20e-6),
        batch_samples=batch,
        end_epochs=1,
        boundary_steps=None,
    )
    even, ours = simulate(scenario, Even(), seed=seed), simulate(scenario, HeterotrainPolicy(), seed=seed)
    assert 1 - ours.end_s / even.end_s > saved
    # Steps of OPT take 23 s: the first ten of them are four minutes.
    first_s = MINUTE_S if workload == "bert" else 6 * MINUTE_S
    gained = samples_until(first_s, ours) / samples_until(first_s, even)
    assert gained > (0.98 if len(gpus) == 1 else 1.05)
