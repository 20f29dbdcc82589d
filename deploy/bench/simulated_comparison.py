"""Simulated: five policies on published workloads and two GPU mixes. Prints Markdown; docs/simulation.md quotes it.

First, one global batch for everybody: what shares alone bring, and how fast each policy finds them. Then the time to the
published target where those who can choose the batch. Usage: simulated_comparison.py [--seeds N] [WORKLOAD …]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from heterotrain_cli.simulate.reading import POLICIES
from heterotrain_cli.simulate.summary import summarise
from heterotrain_cli.simulate.tables import span
from heterotrain_core.simulate.buckets import Network
from heterotrain_core.simulate.engine import simulate
from heterotrain_core.simulate.outcome import Outcome
from heterotrain_core.simulate.published import PRICES_PER_HOUR, WORKLOADS
from heterotrain_core.simulate.scenario import Group, Scenario
from heterotrain_core.simulate.world import Worker, World

NETWORK = Network(bytes_per_s=0.8 * 25e9 / 8, latency_s=20e-6)
MIXES: Mapping[str, tuple[tuple[str, int], ...]] = {
    "4 A100 + 4 V100 + 8 RTX 6000": (("a100", 4), ("v100", 4), ("rtx6000", 8)),
    "2 A100 + 6 RTX 2080 Ti + 8 T4": (("a100", 2), ("rtx2080ti", 6), ("t4", 8)),
}
FIXED_BATCH = {"cifar10": 2048, "imagenet": 6400, "deepspeech2": 640, "bert": 384}
FIXED_EPOCHS = 12
NEAR = 1.02


def scenario(workload: str, mix: Sequence[tuple[str, int]], *, adaptive: bool) -> Scenario:
    """Return one workload on one mix; adaptive runs begin with the least batch that gives everybody a measured share."""
    published = WORKLOADS[workload]
    groups = tuple(
        Group(pool=gpu, gpu=gpu, count=count, price_per_hour=PRICES_PER_HOUR.get(gpu, 0.0)) for gpu, count in mix
    )
    least = sum(count * published.step_ms[gpu][0][0] for gpu, count in mix)
    return Scenario(
        name=workload,
        workload=published,
        groups=groups,
        network=NETWORK,
        batch_samples=max(published.base_batch, least) if adaptive else FIXED_BATCH[workload],
        adaptive=adaptive,
        end_epochs=0 if adaptive else FIXED_EPOCHS,
    )


def runs(of: Scenario, policy: str, seeds: int) -> list[Outcome]:
    """Return one outcome for each seed."""
    return [simulate(of, POLICIES[policy](), seed=seed) for seed in range(1, seeds + 1)]


def epochs_until_near(of: Scenario, outcome: Outcome) -> int | None:
    """Return after how many epochs the shares' own step stayed within 2 % of the true optimum; ``None`` if never."""
    world = World(of)
    workers = [Worker(name=f"{g.pool}-{i}", pool=g.pool, gpu=g.gpu, index=i) for g in of.groups for i in range(g.count)]
    best = world.optimum(workers, of.batch_samples, 0.0)
    if best is None:
        return None
    far = [i for i, row in enumerate(outcome.rows) if row.planned_s > NEAR * best.step_s]
    after = far[-1] + 1 if far else 0
    return after if after < len(outcome.rows) else None


def fixed(workloads: Sequence[str], seeds: int) -> None:
    """Print what shares alone bring at one batch."""
    print(
        "| workload, batch | GPUs | policy | step | against even | efficiency | within 2 % of the optimum | prediction off |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for workload in workloads:
        for name, mix in MIXES.items():
            of = replace(scenario(workload, mix, adaptive=False))
            even_s = 0.0
            for policy in ("even", "proportional", "cannikin", "ours"):
                outcomes = runs(of, policy, seeds)
                step_s = statistics.mean(o.rows[-1].step_s or 0.0 for o in outcomes)
                even_s = even_s or step_s
                summary = summarise(outcomes, target_steps=of.workload.target_steps)
                near = [epochs_until_near(of, o) for o in outcomes]
                after = "never" if None in near else f"after epoch {max(n for n in near if n is not None)}"
                off = "–" if summary.prediction_error is None else f"{summary.prediction_error:.1%}"
                print(
                    f"| {workload}, {of.batch_samples} | {name} | {policy} | {step_s:.3f} s | {even_s / step_s:.2f} × "
                    f"| {summary.efficiency or 0:.3f} | {after} | {off} |",
                    flush=True,
                )


def to_target(workloads: Sequence[str], seeds: int) -> None:
    """Print the time to the target with a batch that may be chosen."""
    print("| workload, target | GPUs | policy | to target | against even | against adaptive-even |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for workload in workloads:
        for name, mix in MIXES.items():
            of = scenario(workload, mix, adaptive=True)
            times: dict[str, float] = {}
            for policy in POLICIES:
                summary = summarise(runs(of, policy, seeds), target_steps=of.workload.target_steps)
                times[policy] = summary.target_s or float("inf")
                adaptive = f"{times['adaptive-even'] / times[policy]:.2f} ×" if "adaptive-even" in times else "–"
                print(
                    f"| {workload}, {of.workload.target} | {name} | {policy} | {span(times[policy])} "
                    f"| {times['even'] / times[policy]:.2f} × | {adaptive} |",
                    flush=True,
                )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(FIXED_BATCH))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["fixed", "target"])
    arguments = parser.parse_args()
    print(f"All figures are simulated; mean over {arguments.seeds} seeds.\n")
    if arguments.only != "target":
        fixed(arguments.workloads, arguments.seeds)
        print()
    if arguments.only != "fixed":
        to_target(arguments.workloads, arguments.seeds)


if __name__ == "__main__":
    main()
