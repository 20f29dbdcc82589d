"""`make bench-convergence`: seconds to a target accuracy on the real cluster, with three policies and several seeds.

The policies are even shares of a fixed batch; even shares of an adaptive batch, which is AdaptDL's policy; and learned
shares of an adaptive batch. The operator runs all of them, the first two with `rebalance.boundary: Never`. All three
begin with the same batch and learning rate, and the clock starts with the first step. Nothing is asserted: the result
is a table and a picture of the curves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from heterotrain_core.contract import keys
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from lab.cluster import REPOSITORY, Cluster, ClusterError
from lab.demo import prepare
from lab.install import install, this_cluster
from lab.jobs import EXAMPLE, Job, example, fresh_folder
from lab.live_view import Live

TARGET = 0.80
BATCH, MOST_BATCH = 32, 512
EPOCH_SAMPLES = 2048
MOST_EPOCHS = 12
LEARNING_RATE = 0.001
WRONG = 0.5
SCRIPTS = (EXAMPLE / "train.py", REPOSITORY / "deploy/dev/lab/training/noisy_digits.py")
CONFIG_MAP = "convergence-scripts"
ADAPTIVE = {"adaptiveBatch": {"min": BATCH, "max": MOST_BATCH}, "learningRateScaling": "Sqrt"}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "even shares": {"globalBatchSize": BATCH, "rebalance": {"boundary": "Never"}},
    "adaptive batch, even shares": {**ADAPTIVE, "rebalance": {"boundary": "Never"}},
    "adaptive batch, learned shares": {**ADAPTIVE, "rebalance": {"boundary": "Epoch"}},
}
COLOURS = ("#8c8c8c", "#4c72b0", "#2a7f3f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Test accuracy after a number of seconds, steps and samples."""

    at_s: float
    steps: int
    samples: int
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run of one policy, from its first step to the target or the last epoch."""

    policy: str
    seed: int
    points: tuple[Point, ...]

    @property
    def reached(self) -> Point | None:
        """The first point at or above the target, or ``None``."""
        return next((point for point in self.points if point.accuracy >= TARGET), None)

    @property
    def last_batch_samples(self) -> float:
        """Mean global batch of the last epoch."""
        before, last = self.points[-2], self.points[-1]
        return (last.samples - before.samples) / max(1, last.steps - before.steps)


def main() -> int:
    """Run all policies with all seeds, print the table and draw the curves; on an error print it and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/convergence")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policy", action="append", choices=list(POLICIES), help="only these; may be repeated")
    arguments = parser.parse_args()
    curves: list[Curve] = []
    try:
        cluster = this_cluster("convergence")
        install(cluster)
        prepare(cluster)
        data = {path.name: path.read_text() for path in SCRIPTS}
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CONFIG_MAP}, "data": data})
        for seed in range(1, arguments.seeds + 1):
            for policy in arguments.policy or POLICIES:
                print(f"\n==> {policy}, seed {seed}", flush=True)
                curves.append(run(cluster, policy, seed))
    except (ClusterError, AssertionError) as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 1
    finally:
        if curves:
            arguments.out.mkdir(parents=True, exist_ok=True)
            show(curves, arguments.out / "table.txt")
            draw(curves, arguments.out / "convergence.png")
    return 0


def run(cluster: Cluster, policy: str, seed: int) -> Curve:
    """Train once, delete the job and return its curve.

    Raises:
        ClusterError: the job did not end in time, or wrote no curve.
    """
    name = f"run-{list(POLICIES).index(policy)}-{seed}"
    folder = fresh_folder(name)
    cluster.apply(manifest(name, POLICIES[policy], seed))
    job = Job(cluster, name)
    with Live(job):
        job.wait_true("Succeeded", timeout_s=420)
    cluster.delete(keys.PLURAL, name)
    curve = Curve(policy=policy, seed=seed, points=read(folder / "curve.jsonl"))
    for point in curve.points:
        print(f"{point.at_s:6.1f} s  step {point.steps:<4} {point.samples:>6} samples  accuracy {point.accuracy:.3f}")
    return curve


def manifest(name: str, training: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the job: the example's pools and pod with another script and other training settings."""
    job = example(name, spec={"elasticPolicy": {"minReplicas": 3, "maxReplicas": 3}})
    job["spec"]["training"] = {"epochs": MOST_EPOCHS, "seed": seed, **training}
    pod = job["spec"]["template"]["spec"]
    pod["containers"][0]["command"] = [
        "heterotrain-run", "/script/noisy_digits.py", "--curve", "/checkpoints/curve.jsonl", "--target", str(TARGET),
        "--samples-per-epoch", str(EPOCH_SAMPLES), "--wrong", str(WRONG), "--learning-rate", str(LEARNING_RATE),
    ]  # fmt: skip
    pod["volumes"][0]["configMap"]["name"] = CONFIG_MAP
    return job


def read(path: Path) -> tuple[Point, ...]:
    """Return a curve; its clock starts at the first line, which is the beginning of the first step.

    Raises:
        ClusterError: the file has no curve.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if len(lines) < 2:  # noqa: PLR2004  # the start and one epoch
        raise ClusterError(f"the run wrote no curve to {path}")
    first_s = lines[0]["at_s"]
    return tuple(
        Point(at_s=line["at_s"] - first_s, steps=line["steps"], samples=line["samples"], accuracy=line["accuracy"])
        for line in lines
    )


def show(curves: Sequence[Curve], path: Path) -> None:
    """Print a row for each policy and write the table to a file."""
    table = Table(title=f"To {TARGET:.0%} test accuracy, CPU limits 4 : 2 : 1, mean of the seeds (least to most)")
    for heading in ("", "seconds", "times as fast", "samples", "last batch", "samples/s"):
        table.add_column(heading, justify="right" if heading else "left")
    baseline: float | None = None
    for policy in POLICIES:
        mine = [curve for curve in curves if curve.policy == policy]
        reached = [curve.reached for curve in mine]
        points = [point for point in reached if point is not None]
        if not mine:
            continue
        if len(points) < len(mine):
            table.add_row(policy, f"{len(mine) - len(points)} of {len(mine)} did not get there", "", "", "", "")
            continue
        seconds = statistics.mean(point.at_s for point in points)
        baseline = baseline or seconds
        table.add_row(
            policy,
            _spread([point.at_s for point in points]),
            f"{baseline / seconds:.2f}",
            _spread([float(point.samples) for point in points]),
            _spread([curve.last_batch_samples for curve in mine]),
            f"{sum(point.samples for point in points) / sum(point.at_s for point in points):.0f}",
        )
    console = Console(record=True, width=120)
    console.print(table)
    path.write_text(console.export_text())


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw accuracy against seconds, one line for each run."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for policy, colour in zip(POLICIES, COLOURS, strict=True):
        for i, curve in enumerate(curve for curve in curves if curve.policy == policy):
            axes.plot(
                [point.at_s for point in curve.points],
                [point.accuracy for point in curve.points],
                color=colour,
                label=policy if i == 0 else None,
                linewidth=1.2,
            )
            if (point := curve.reached) is not None:
                axes.plot([point.at_s], [point.accuracy], "o", color=colour, markersize=5)
    axes.axhline(TARGET, color="black", linestyle=":", linewidth=1)
    axes.set(xlabel="seconds since the first step", ylabel="test accuracy", xlim=(0, None), ylim=(0, 1))
    axes.set_title("Measured: three pools with CPU limits 4 : 2 : 1, digits with wrong labels, every run of every seed")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
