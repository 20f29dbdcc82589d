"""Simulated: many jobs on shared pools, two of them recorded spot capacity. Prints Markdown for research/README.md.

Jobs of the published workloads arrive at random (seeded) for eight hours. The comparison has the operator's allocation,
the same allocation with one GPU type for each job, and first come, first served.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.fleet import Fleet, FleetJob, run_fleet
from heterotrain_simulator.scenario import Group
from heterotrain_simulator.schedulers import Allocator, any_mix, first_come, one_pool_each
from heterotrain_simulator.spot_traces import G4DN, P3, as_changes
from heterotrain_simulator.workloads import BERT, CIFAR10, DEEPSPEECH2, IMAGENET, PRICES_PER_HOUR, Workload
from spreads import spread

HOURS = 8.0
# A part of each workload's own training, so that a job takes minutes to hours: epochs, global batch.
KINDS: tuple[tuple[Workload, float, int], ...] = (
    (CIFAR10, 300, 1024),
    (IMAGENET, 20, 1600),
    (DEEPSPEECH2, 300, 160),
    (BERT, 6, 96),
)


def fleet(seed: int, jobs: int) -> Fleet:
    """Return four A100 on demand, and V100 and T4 from the p3 and g4dn traces."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0, HOURS * 3600, jobs))
    coming = []
    for i, arrived_s in enumerate(arrivals.tolist()):
        workload, epochs, batch = KINDS[int(rng.integers(len(KINDS)))]
        coming.append(
            FleetJob(
                key=f"{workload.name}-{i}",
                workload=workload,
                batch_samples=batch,
                samples=workload.epoch_samples * epochs * float(rng.uniform(0.3, 1.0)),
                arrived_s=arrived_s,
                max_workers=16,
            )
        )
    return Fleet(
        groups=(
            Group(pool="a100", gpu="a100", count=4, price_per_hour=PRICES_PER_HOUR["a100"]),
            Group(pool="v100-spot", gpu="v100", count=0, price_per_hour=PRICES_PER_HOUR["v100"]),
            Group(pool="t4-spot", gpu="t4", count=0),
        ),
        spot=frozenset({"v100-spot", "t4-spot"}),
        changes=(*as_changes(P3, "v100-spot"), *as_changes(G4DN, "t4-spot")),
        network=Network(bytes_per_s=0.8 * 25e9 / 8, latency_s=20e-6),
        jobs=tuple(coming),
    )


def main() -> None:
    """Print one row for each allocator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"Simulated: {arguments.jobs} jobs in {HOURS:g} h, mean over {arguments.seeds} seeds, ranges in brackets.\n")
    print("| allocation | mean time of a job | slowest tenth | mean wait | worker changes | all done after |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    kinds: dict[str, Allocator] = {
        "any mix of pools (the operator's)": any_mix,
        "the same, one GPU type for each job": one_pool_each,
        "first come, first served, any mix": first_come,
    }
    for name, allocator in kinds.items():
        means: list[float] = []
        tenths: list[float] = []
        waits: list[float] = []
        changes: list[float] = []
        ends: list[float] = []
        for seed in range(1, arguments.seeds + 1):
            scenario = fleet(seed, arguments.jobs)
            outcome = run_fleet(scenario, allocator)
            if missing := [job.key for job in scenario.jobs if job.key not in outcome.finished_s]:
                raise SystemExit(f"{name}: {missing} never ended")
            minutes = [(outcome.finished_s[job.key] - job.arrived_s) / 60 for job in scenario.jobs]
            means.append(statistics.mean(minutes))
            tenths.append(statistics.quantiles(minutes, n=10)[-1])
            waits.append(statistics.mean(outcome.waited_s.values()) / 60)
            changes.append(outcome.changes)
            ends.append(outcome.end_s)
        hours = [end_s / 3600 for end_s in ends]
        print(
            f"| {name} | {spread(means, '.1f')} min | {spread(tenths, '.1f')} min | {spread(waits, '.1f')} min "
            f"| {spread(changes, '.0f')} | {spread(hours, '.1f')} h |",
            flush=True,
        )


if __name__ == "__main__":
    main()
