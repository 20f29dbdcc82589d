"""Simulated: three workstation cards of very different speed, from a small first batch. Prints Markdown.

Cannikin reports up to 52 % less time than an adaptive system and up to 85 % less than DDP, for an RTX A5000, an RTX
A4000 and a Quadro P4000, and first batches of about 64, 100, 12 and 9 samples. Assumed: no times of these cards were
published with the workloads, so they are those of the RTX 2080 Ti, divided by ratios of sustained FP32 arithmetic.
The optimum knows all times: the batch of best goodput at every moment, with the exact split.
Usage: simulated_cannikin.py [--seeds N] [--gigabits G] [WORKLOAD …]
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace

from heterotrain_planner.goodput import candidate_batches
from heterotrain_simulate.scenario_file import POLICIES
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.convergence import gain, noise_scale
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.scenario import Group, Scenario
from heterotrain_simulator.workloads import WORKLOADS
from spreads import spread

CARDS = {"a5000": 1.40, "a4000": 1.05, "p4000": 0.38}
"""Speed relative to an RTX 2080 Ti."""
FIRST_BATCH = {"cifar10": 64, "imagenet": 100, "deepspeech2": 12, "bert": 9}
SHOWN = ("even", "adaptive-even", "cannikin", "heterotrain")
BOUNDARY_STEPS = {"bert": 200}
"""Two epochs reach the target of BERT, so shares have to change within them; the others change with epochs."""
PARTS = 400
"""Moments of the optimum's training."""


def scenario(workload: str, gigabits_per_s: float) -> Scenario:
    """Return the workload on the three cards."""
    published = WORKLOADS[workload]
    known = published.step_ms["rtx2080ti"]
    scaled = {card: tuple((samples, ms / speed) for samples, ms in known) for card, speed in CARDS.items()}
    return Scenario(
        name=workload,
        workload=replace(published, step_ms={**published.step_ms, **scaled}),
        groups=tuple(Group(pool=card, gpu=card, count=1) for card in CARDS),
        network=Network(bytes_per_s=0.8 * gigabits_per_s * 1e9 / 8, latency_s=20e-6),
        batch_samples=FIRST_BATCH[workload],
        adaptive=True,
        boundary_steps=BOUNDARY_STEPS.get(workload, 0),
    )


def optimum_s(of: Scenario) -> float:
    """Return the seconds to the target with the best batch and the exact split at every moment, without noise."""
    workload, truth = of.workload, GroundTruth(of)
    workers = [Worker(name=group.pool, pool=group.pool, gpu=group.gpu, index=0) for group in of.groups]
    steps = {
        batch: split.step_s
        for batch in candidate_batches(least=of.batch_samples, most=workload.most_batch)
        if (split := truth.optimum(workers, batch, 0.0)) is not None
    }
    part = workload.target_steps / PARTS
    total = 0.0
    for index in range(PARTS):
        noise = noise_scale(workload, (index + 0.5) * part)
        worths = {batch: gain(batch, base_batch=workload.base_batch, noise_samples=noise) for batch in steps}
        total += part * min(step_s / worths[batch] for batch, step_s in steps.items())
    return total


def main() -> None:
    """Print one row for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["cifar10", "deepspeech2", "bert"], help="imagenet takes hours")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gigabits", type=float, default=10.0)
    arguments = parser.parse_args()
    print(f"| workload, first batch | {' | '.join(SHOWN)} | the optimum | saved of even, of adaptive-even |")
    print(f"| --- |{' ---: |' * (len(SHOWN) + 2)}")
    for workload in arguments.workloads:
        of = scenario(workload, arguments.gigabits)
        found = {
            policy: [simulate(of, POLICIES[policy](), seed=seed).target_s or math.inf for seed in seeds]
            for seeds in [range(1, arguments.seeds + 1)]
            for policy in SHOWN
        }
        means = {policy: statistics.mean(seconds) for policy, seconds in found.items()}
        unit, unit_s = ("h", 3600.0) if means["heterotrain"] > 7200 else ("min", 60.0)  # noqa: PLR2004  # two hours
        cells = [f"{spread([s / unit_s for s in found[policy]], '.1f')} {unit}" for policy in SHOWN]
        cells.append(f"{optimum_s(of) / unit_s:.1f} {unit}")
        cells.append(" and ".join(f"{1 - means['heterotrain'] / means[other]:.0%}" for other in SHOWN[:2]))
        print(f"| {workload}, {of.batch_samples} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
