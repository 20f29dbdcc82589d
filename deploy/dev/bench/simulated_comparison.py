"""Simulated: five policies on published workloads and two GPU mixes. Prints Markdown for docs/simulation.md.

The first table has one global batch for all policies: the gain of shares alone, and the epochs until they are near the
optimum. The second one has the time to the published target, with an adaptive batch where a policy can. Usage:
simulated_comparison.py [--seeds N] [--target-seeds N] [--picture FILE] [WORKLOAD …]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from heterotrain_cli.simulate.pictures import COLOURS
from heterotrain_cli.simulate.scenario_file import POLICIES
from heterotrain_cli.simulate.summary import summarize
from heterotrain_cli.simulate.tables import span
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.result import RunResult
from heterotrain_simulator.scenario import Group, Scenario
from heterotrain_simulator.workloads import PRICES_PER_HOUR, WORKLOADS

NETWORK = Network(bytes_per_s=0.8 * 25e9 / 8, latency_s=20e-6)
MIXES: Mapping[str, tuple[tuple[str, int], ...]] = {
    "4 A100 + 4 V100 + 8 RTX 6000": (("a100", 4), ("v100", 4), ("rtx6000", 8)),
    "2 A100 + 6 RTX 2080 Ti + 8 T4": (("a100", 2), ("rtx2080ti", 6), ("t4", 8)),
}
FIXED_BATCH = {"cifar10": 2048, "imagenet": 6400, "deepspeech2": 640, "bert": 384}
FIXED_EPOCHS = 12
NEAR = 1.02


def scenario(workload: str, mix: Sequence[tuple[str, int]], *, adaptive: bool) -> Scenario:
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
        network=NETWORK,
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


def fixed(workloads: Sequence[str], seeds: int) -> None:
    """Print the gain of shares alone at one batch."""
    print(
        "| workload, batch | GPUs | policy | step | against even | efficiency | within 2 % of the optimum "
        "| prediction off |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for workload in workloads:
        for name, mix in MIXES.items():
            of = scenario(workload, mix, adaptive=False)
            even_s = 0.0
            for policy in ("even", "proportional", "cannikin", "heterotrain"):
                outcomes = runs(of, policy, seeds)
                step_s = statistics.mean(o.periods[-1].step_s or 0.0 for o in outcomes)
                even_s = even_s or step_s
                summary = summarize(outcomes, target_steps=of.workload.target_steps)
                near = [epochs_until_near(of, o) for o in outcomes]
                after = "never" if None in near else f"after epoch {max(n for n in near if n is not None)}"
                off = "–" if summary.prediction_error is None else f"{summary.prediction_error:.1%}"
                print(
                    f"| {workload}, {of.batch_samples} | {name} | {policy} | {step_s:.3f} s | {even_s / step_s:.2f} × "
                    f"| {summary.efficiency or 0:.3f} | {after} | {off} |",
                    flush=True,
                )


def to_target(workloads: Sequence[str], seeds: int) -> dict[tuple[str, str], dict[str, float]]:
    """Print the time to the target with an adaptive batch; return its seconds by (workload, GPUs) and policy."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    print("| workload, target | GPUs | policy | to target | against even | against adaptive-even |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for workload in workloads:
        for name, mix in MIXES.items():
            of = scenario(workload, mix, adaptive=True)
            times = found.setdefault((workload, name), {})
            for policy in POLICIES:
                summary = summarize(runs(of, policy, seeds), target_steps=of.workload.target_steps)
                times[policy] = summary.target_s or float("inf")
                adaptive = f"{times['adaptive-even'] / times[policy]:.2f} ×" if "adaptive-even" in times else "–"
                print(
                    f"| {workload}, {of.workload.target} | {name} | {policy} | {span(times[policy])} "
                    f"| {times['even'] / times[policy]:.2f} × | {adaptive} |",
                    flush=True,
                )

    return found


def draw(times: Mapping[tuple[str, str], Mapping[str, float]], path: Path) -> None:
    """Draw each policy's speed to the target relative to even shares."""
    import matplotlib as mpl  # noqa: PLC0415  # the tables do not need it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # only after the backend is chosen

    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
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
    axes.legend(frameon=False, fontsize=8, ncols=len(POLICIES), columnspacing=1)
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(FIXED_BATCH))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row of the first table")
    parser.add_argument("--target-seeds", type=int, default=1, help="runs of each row of the second, much longer one")
    parser.add_argument("--only", choices=["fixed", "target"])
    parser.add_argument("--picture", type=Path, help="file for a picture of the second table")
    arguments = parser.parse_args()
    if arguments.only != "target":
        print(f"Simulated: one global batch for all, {FIXED_EPOCHS} epochs, mean over {arguments.seeds} seeds.\n")
        fixed(arguments.workloads, arguments.seeds)
        print()
    if arguments.only != "fixed":
        print(f"Simulated: until the published target, mean over {arguments.target_seeds} seeds.\n")
        times = to_target(arguments.workloads, arguments.target_seeds)
        if arguments.picture:
            draw(times, arguments.picture)


if __name__ == "__main__":
    main()
