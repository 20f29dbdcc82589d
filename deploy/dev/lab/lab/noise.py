"""`make bench-noise`: balanced shares and shares of the least expected step, on a cluster where one pool is noisy.

1. A job on the three pools learns for some epochs, as any job does. One pool's steps vary at random. Then the operator
   is switched off.
2. From the counters that the operator reads, its own code computes two vectors of shares for the same batch: those that
   let all workers finish together on average (balanced), and those of the least expected step (the operator's choice).
3. Plans alternate between both vectors, in the order ABBA, so that a drift of the machine affects both alike. Their
   mean steps are printed side by side with the predictions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heterotrain_core.contract import keys
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.balance import Infeasible, balance
from heterotrain_planner.planning.evidence import split_member
from heterotrain_planner.planning.fitting import fit_members
from heterotrain_planner.planning.shares import MemberEvidence
from heterotrain_planner.planning.variation import shrunk_variations
from heterotrain_planner.split.expected import balance_expected, efficiency_ceiling, expected_step_s
from rich.console import Console
from rich.table import Table

from lab.cluster import REPOSITORY, Cluster, ClusterError
from lab.demo import prepare
from lab.install import install, this_cluster
from lab.jobs import Job, example, fresh_folder, script
from lab.live_view import Live
from lab.prediction import in_turns, switch
from lab.scrapes import Scrapes, mean_with_error
from lab.telemetry import Prometheus

TRAINING = REPOSITORY / "deploy/dev/lab/training/noisy_pool.py"
BATCH = 240
LEARNING_STEPS = 96
"""Steps of an epoch."""
LEARNING_EPOCHS = 3
MILLISECONDS = {"a100": 1.0, "v100": 2.0, "t4": 3.0}
"""Time of a sample, by pool."""
NOISY = "t4"
CPU = "300m"
"""Limit of every pod; its work is a sleep."""
STEPS = 25
"""Least number of steps of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """One vector of shares: its prediction and its measurement, in seconds of a step."""

    name: str
    shares: tuple[int, ...]
    predicted_s: float
    measured_s: float = 0.0
    error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Both vectors for what was learned; ``ceiling`` is the efficiency that no shares exceed."""

    rows: tuple[Shares, ...]
    variations: tuple[float, ...]
    solo_samples_per_s: float
    ceiling: float


def main() -> int:
    """Measure, print the table and write it to ``--out``; on an error print it and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/noise")
    parser.add_argument("--variation", type=float, default=0.4, help="of the noisy pool's steps, relative (0.4)")
    parser.add_argument("--rounds", type=int, default=16, help="of both vectors of shares (16)")
    arguments = parser.parse_args()
    try:
        cluster = this_cluster("noise")
        install(cluster)
        show(measure(cluster, arguments.variation, rounds=arguments.rounds), arguments.out)
    except (ClusterError, AssertionError) as error:
        print(f"noise: {error}", file=sys.stderr)
        return 1
    return 0


def measure(cluster: Cluster, variation: float, *, rounds: int) -> Choice:
    """Let a job learn, then measure both vectors in turns without the operator; switch it on again afterwards."""
    prepare(cluster)
    job = start(cluster, variation)
    scrapes = Scrapes(Prometheus(cluster), job.uid(), known_s=time.time())
    try:
        with Live(job):
            job.wait_epoch(LEARNING_EPOCHS, timeout_s=300)
        switch(cluster, replicas=0)
        scrapes.read(until_s=time.time())
        plan = job.plan()
        if plan is None:
            raise ClusterError("the job has no plan")
        choice = choose(scrapes.evidence(plan))
        vectors = [row.shares for row in choice.rows]
        if len(set(vectors)) == 1:
            raise ClusterError(f"both ways give the same shares {vectors[0]}: nothing to compare")
        _, observed = in_turns(cluster, job, scrapes, plan, vectors, rounds=rounds, turn_steps=STEPS)
        measured = [mean_with_error(each) for each in observed]
        return Choice(
            rows=tuple(
                Shares(name=row.name, shares=row.shares, predicted_s=row.predicted_s, measured_s=mean, error_s=error)
                for row, (mean, error) in zip(choice.rows, measured, strict=True)
            ),
            variations=choice.variations,
            solo_samples_per_s=choice.solo_samples_per_s,
            ceiling=choice.ceiling,
        )
    finally:
        switch(cluster, replicas=1)
        cluster.delete(keys.PLURAL, job.name)


def start(cluster: Cluster, variation: float) -> Job:
    """Apply the job, with each pod told its pool."""
    fresh_folder("noise")
    times = [f"{pool}={ms}" for pool, ms in MILLISECONDS.items()]
    manifest = example(
        "noise",
        training={"epochs": 1000, "globalBatchSize": BATCH},
        arguments=["--samples-per-epoch", str(LEARNING_STEPS * BATCH), "--noisy", NOISY, "--variation", str(variation),
                   "--milliseconds", *times],
        spec={"elasticPolicy": {"minReplicas": 3, "maxReplicas": 3}},
        limits=dict.fromkeys(MILLISECONDS, CPU),
    )  # fmt: skip
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["command"] = ["heterotrain-run", f"/script/{TRAINING.name}", *container["command"][4:]]
    path = f"metadata.labels['{keys.LABEL_POOL}']"
    container["env"] = [{"name": "POOL", "valueFrom": {"fieldRef": {"fieldPath": path}}}]
    source = script()
    source["data"][TRAINING.name] = TRAINING.read_text()
    cluster.apply(source, manifest)
    return Job(cluster, "noise")


def choose(evidence: Sequence[MemberEvidence]) -> Choice:
    """Return both vectors with their predicted steps."""
    fits = fit_members(evidence)
    models = fits.models(total_samples=BATCH)
    members = [split_member(m, x.compute) for m, x in zip(evidence, models, strict=True) if x.compute is not None]
    if len(members) < len(evidence):
        raise ClusterError("not every worker's speed is known")
    communication = fits.exchange.communication or CommunicationTime()
    variations, hiccups = shrunk_variations(models), models[0].hiccups
    balanced = balance(BATCH, members, communication=communication)
    expected = balance_expected(BATCH, members, variations, communication=communication, hiccups=hiccups)
    if isinstance(balanced, Infeasible) or isinstance(expected, Infeasible):
        raise ClusterError(f"a batch of {BATCH} cannot be shared")
    rates = [share / own for share, own in zip(balanced.shares, balanced.own_s, strict=True)]
    overhead_s = fits.exchange.overhead_s
    return Choice(
        rows=tuple(
            Shares(
                name=name,
                shares=split.shares,
                predicted_s=expected_step_s(split, variations, hiccups=hiccups) + overhead_s,
            )
            for name, split in (("least expected step", expected.split), ("balanced", balanced))
        ),
        variations=tuple(variations),
        solo_samples_per_s=sum(rates),
        ceiling=efficiency_ceiling(variations, rates, hiccups=hiccups),
    )


def show(choice: Choice, out: Path) -> None:
    """Print the table and write it to ``out/noise.txt``."""
    table = Table(title="Steps with one noisy pool")
    for column in ("shares", "", "predicted", "measured", "samples/s", "efficiency"):
        table.add_column(column, justify="right")
    for row in choice.rows:
        rate = BATCH / row.measured_s
        table.add_row(
            row.name,
            " : ".join(map(str, row.shares)),
            f"{1000 * row.predicted_s:.1f} ms",
            f"{1000 * row.measured_s:.1f} ms ± {1000 * row.error_s:.1f}",
            f"{rate:.0f}",
            f"{rate / choice.solo_samples_per_s:.3f}",
        )
    console = Console(record=True, width=120)
    console.print(table)
    learned = ", ".join(f"{each:.3f}" for each in choice.variations)
    console.print(f"learned variations of the workers' steps: {learned}; ceiling of efficiency {choice.ceiling:.3f}")
    best, other = choice.rows
    console.print(f"balanced shares take {other.measured_s / best.measured_s - 1:+.1%}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "noise.txt").write_text(console.export_text(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
