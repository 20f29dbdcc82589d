"""Simulated: all policies on published workloads and GPU mixes. Prints Markdown for research/README.md.

The first table has one global batch for all policies: the gain of shares alone, and the epochs until they are near the
optimum. The second one has the time to the published target, with an adaptive batch where a policy can. Both are made
for a usual cluster and for a slow, noisy one. Usage: simulated_comparison.py [--seeds N] [--target-seeds N]
[--only TABLE] [--cluster KIND] [--picture FILE] [WORKLOAD …]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterotrain_simulate.pictures import COLOURS
from heterotrain_simulate.scenario_file import POLICIES
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.result import RunResult
from heterotrain_simulator.scenario import Group, Noise, Scenario
from heterotrain_simulator.workloads import PRICES_PER_HOUR, WORKLOADS
from spreads import least_to_most, spread

MIXES: Mapping[str, tuple[tuple[str, int], ...]] = {
    "4 A100 + 4 V100 + 8 RTX 6000": (("a100", 4), ("v100", 4), ("rtx6000", 8)),
    "2 A100 + 6 RTX 2080 Ti + 8 T4": (("a100", 2), ("rtx2080ti", 6), ("t4", 8)),
    "8 V100 + 8 T4": (("v100", 8), ("t4", 8)),
    "1 A100 + 2 V100 + 4 RTX 2080 Ti": (("a100", 1), ("v100", 2), ("rtx2080ti", 4)),
    "8 A100 + 2 T4": (("a100", 8), ("t4", 2)),
}
PUBLISHED_MIXES = tuple(MIXES)[:2]
FIXED_BATCH = {"cifar10": 2048, "imagenet": 6400, "deepspeech2": 640, "bert": 384}
FIXED_EPOCHS = 12
FIXED_POLICIES = ("even", "proportional", "cannikin", "heterotrain")
NEAR = 1.02
_HOURS_FROM_S = 7200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Links and noise, and what is run to its target there."""

    what: str
    gigabits_per_s: float
    noise: Noise
    target_workloads: tuple[str, ...]
    target_mixes: tuple[str, ...]


USUAL = Cluster(
    what="25 Gb/s, 3 % noise",
    gigabits_per_s=25.0,
    noise=Noise(),
    target_workloads=tuple(FIXED_BATCH),
    target_mixes=PUBLISHED_MIXES,
)
SLOW = Cluster(
    what="10 Gb/s, 10 % noise, correlated 0.5 from step to step",
    gigabits_per_s=10.0,
    noise=Noise(variation=0.1, correlation=0.5),
    target_workloads=("bert",),
    target_mixes=tuple(MIXES),
)
CLUSTERS = {"usual": USUAL, "slow": SLOW}


def scenario(workload: str, mix: Sequence[tuple[str, int]], *, adaptive: bool, on: Cluster) -> Scenario:
    """Return one workload on one mix; adaptive runs begin with the smallest batch of measured shares for all ranks."""
    published = WORKLOADS[workload]
    groups = tuple(
        Group(pool=gpu, gpu=gpu, count=count, price_per_hour=PRICES_PER_HOUR.get(gpu, 0.0)) for gpu, count in mix
    )
    least = sum(count * published.step_ms[gpu][0][0] for gpu, count in mix)
    return Scenario(
        name=workload,
        workload=published,
        groups=groups,
        network=Network(bytes_per_s=0.8 * on.gigabits_per_s * 1e9 / 8, latency_s=20e-6),
        noise=on.noise,
        batch_samples=max(published.base_batch, least) if adaptive else FIXED_BATCH[workload],
        adaptive=adaptive,
        end_epochs=0 if adaptive else FIXED_EPOCHS,
    )


def runs(of: Scenario, policy: str, seeds: int) -> list[RunResult]:
    """Return one result for each seed."""
    return [simulate(of, POLICIES[policy](), seed=seed) for seed in range(1, seeds + 1)]


def epochs_until_near(of: Scenario, outcome: RunResult) -> int | None:
    """Return the epochs until shares stay within 2 % of the true optimum; ``None`` if they never do."""
    truth = GroundTruth(of)
    workers = [Worker(name=f"{g.pool}-{i}", pool=g.pool, gpu=g.gpu, index=i) for g in of.groups for i in range(g.count)]
    best = truth.optimum(workers, of.batch_samples, 0.0)
    if best is None:
        return None
    far = [i for i, row in enumerate(outcome.periods) if row.planned_s > NEAR * best.step_s]
    after = far[-1] + 1 if far else 0
    return after if after < len(outcome.periods) else None


def fixed(workloads: Sequence[str], on: Cluster, seeds: int) -> None:
    """Print the gain of shares alone at one batch, then the epochs until shares are near the optimum."""
    near = []
    print(
        f"| workload, batch | GPUs | even | {' | '.join(FIXED_POLICIES[1:])} | heterotrain: efficiency "
        "| heterotrain: prediction off |"
    )
    print(f"| --- | --- |{' ---: |' * (len(FIXED_POLICIES) + 2)}")
    for workload in workloads:
        for name in PUBLISHED_MIXES:
            of = scenario(workload, MIXES[name], adaptive=False, on=on)
            found = {policy: runs(of, policy, seeds) for policy in FIXED_POLICIES}
            steps = {policy: [run.periods[-1].step_s or 0.0 for run in found[policy]] for policy in found}
            cells = [f"{spread(steps['even'], '.3f')} s"]
            for policy in FIXED_POLICIES[1:]:
                gain = statistics.mean(steps["even"]) / statistics.mean(steps[policy])
                cells.append(f"{spread(steps[policy], '.3f')} s, {gain:.2f} ×")
            last = [run.periods[-1] for run in found["heterotrain"]]
            cells.append(
                spread([row.batch_samples / (row.step_s or 1.0) / row.solo_samples_per_s for row in last], ".3f")
            )
            off = [statistics.median(abs(error) for error in run.prediction_errors) for run in found["heterotrain"]]
            cells.append(spread(off, ".1%"))
            print(f"| {workload}, {of.batch_samples} | {name} | {' | '.join(cells)} |", flush=True)
            epochs = [[epochs_until_near(of, run) for run in found[policy]] for policy in FIXED_POLICIES[1:]]
            near.append(f"| {workload} | {name} | {' | '.join(until(each) for each in epochs)} |")
    print(f"\nEpochs until shares stay within {NEAR - 1:.0%} of the true optimum:\n")
    print(f"| workload | GPUs | {' | '.join(FIXED_POLICIES[1:])} |")
    print(f"| --- | --- |{' --- |' * (len(FIXED_POLICIES) - 1)}")
    print("\n".join(near), flush=True)


def until(epochs: Sequence[int | None]) -> str:
    """Return the least and the greatest number of epochs, and how many runs never got there."""
    known = [float(each) for each in epochs if each is not None]
    if not known:
        return "never"
    never = len(epochs) - len(known)
    return least_to_most(known, ".0f") + (f", never in {never} of {len(epochs)}" if never else "")


def to_target(
    workloads: Sequence[str], mixes: Sequence[str], on: Cluster, seeds: int
) -> dict[tuple[str, str], dict[str, float]]:
    """Print the time to the target with an adaptive batch; return its mean seconds by (workload, GPUs) and policy."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    print(f"| workload, target | GPUs | {' | '.join(POLICIES)} |")
    print(f"| --- | --- |{' ---: |' * len(POLICIES)}")
    for workload in workloads:
        for name in mixes:
            of = scenario(workload, MIXES[name], adaptive=True, on=on)
            times = {policy: [run.target_s or math.inf for run in runs(of, policy, seeds)] for policy in POLICIES}
            means = found.setdefault((workload, name), {policy: statistics.mean(times[policy]) for policy in times})
            unit, unit_s = ("h", 3600.0) if means["even"] > _HOURS_FROM_S else ("min", 60.0)
            form = ".2f" if unit == "h" else ".1f"
            cells = []
            for policy in POLICIES:
                cell = f"{spread([seconds / unit_s for seconds in times[policy]], form)} {unit}"
                cell += "" if policy == "even" else f", {means['even'] / means[policy]:.2f} ×"
                cells.append(f"**{cell}**" if means[policy] == min(means.values()) else cell)
            print(f"| {workload}, {of.workload.target} | {name} | {' | '.join(cells)} |", flush=True)
    return found


def draw(times: Mapping[tuple[str, str], Mapping[str, float]], path: Path) -> None:
    """Draw each policy's speed to the target relative to even shares."""
    import matplotlib as mpl  # noqa: PLC0415  # the tables do not need it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # only after the backend is chosen

    figure, axes = plt.subplots(figsize=(1.3 * max(6, len(times)), 4.2), layout="constrained")
    width = 1 / (len(POLICIES) + 1)
    for i, policy in enumerate(POLICIES):
        gains = [by_policy["even"] / by_policy[policy] for by_policy in times.values()]
        places = [place + i * width for place in range(len(times))]
        bars = axes.bar(places, gains, width, color=COLOURS[policy], label=policy)
        axes.bar_label(bars, fmt="%.1f", fontsize=6.5, padding=1)
    labels = [f"{workload}\n{gpus.replace(' + ', chr(10))}" for workload, gpus in times]
    axes.set_xticks([place + (len(POLICIES) - 1) / 2 * width for place in range(len(times))], labels, fontsize=7)
    axes.set(ylabel="times as fast to the target as even shares", ylim=(0, None))
    axes.set_title("Simulated: time to the published target; each policy that can choose the batch does", fontsize=9)
    axes.legend(loc="upper left", frameon=False, fontsize=8, ncols=len(POLICIES), columnspacing=1)
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(FIXED_BATCH))
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row with one batch")
    parser.add_argument("--target-seeds", type=int, default=5, help="runs of each row to the target: much longer ones")
    parser.add_argument("--only", choices=["fixed", "target"])
    parser.add_argument("--cluster", choices=list(CLUSTERS), action="append", help="one kind of cluster only")
    parser.add_argument("--picture", type=Path, help="file for a picture of the times to the target")
    arguments = parser.parse_args()
    of_seeds = "mean over {} seeds, the least and the greatest in brackets"
    drawn: dict[tuple[str, str], dict[str, float]] = {}
    for key in arguments.cluster or CLUSTERS:
        on = CLUSTERS[key]
        if arguments.only != "target":
            print(
                f"Simulated, {on.what}: one global batch, {FIXED_EPOCHS} epochs, {of_seeds.format(arguments.seeds)}.\n"
            )
            fixed(arguments.workloads, on, arguments.seeds)
            print()
        if arguments.only != "fixed":
            print(f"Simulated, {on.what}: until the target, {of_seeds.format(arguments.target_seeds)}.\n")
            workloads = [workload for workload in arguments.workloads if workload in on.target_workloads]
            times = to_target(workloads, on.target_mixes, on, arguments.target_seeds)
            print()
            drawn |= {(f"{workload}, {on.gigabits_per_s:g} Gb/s", gpus): row for (workload, gpus), row in times.items()}
    if arguments.picture:
        draw(drawn, arguments.picture)


if __name__ == "__main__":
    main()
