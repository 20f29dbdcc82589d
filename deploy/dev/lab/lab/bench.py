"""`make bench`: measure on the real cluster and print a table with each figure next to its alternative.

Nothing is asserted, because times differ from machine to machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.cluster import REPOSITORY, Cluster, ClusterError
from lab.demo import Run, best, finish, prepare, start
from lab.efficiency import Efficiency
from lab.install import install, this_cluster
from lab.live_view import Live
from lab.one_epoch import STEPS, measure_one_epoch
from lab.pauses import measure_pauses
from lab.telemetry import Prometheus

BATCH = 960
EPOCH_SAMPLES = 24 * BATCH
"""24 steps per epoch, which take about 25 s with limits of 0.98 cores in total and 1 ms per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the table: the measured quantity, both results, and the method."""

    what: str
    heterotrain: str
    alternative: str
    how: str


def main() -> int:
    """Measure the chosen parts, print the table, and write it to ``--out``."""
    parts: dict[str, Callable[[Cluster], Sequence[Figure]]] = {
        "efficiency": efficiency,
        "one-epoch": one_epoch,
        "pauses": pauses,
        "start": cluster_start,  # last: it takes the cluster down and up again
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="parts to measure; all by default")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/bench")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    try:
        cluster = this_cluster("bench")
        install(cluster)
        for name in arguments.parts or parts:
            print(f"\n==> {name}", flush=True)
            figures.extend(parts[name](cluster))
    except (ClusterError, AssertionError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        if figures:
            show(figures, arguments.out)
    return 0


def efficiency(cluster: Cluster) -> list[Figure]:
    """Measure even and learned shares, one after the other, with steps of at least a second."""
    prepare(cluster)
    prometheus = Prometheus(cluster)
    arguments = ["--samples-per-epoch", str(EPOCH_SAMPLES)]
    even = _train(
        cluster, "even", {"epochs": 1, "globalBatchSize": BATCH, "rebalance": {"boundary": "Never"}}, arguments
    )
    learned = _train(cluster, "learned", {"epochs": 4, "globalBatchSize": BATCH}, arguments)
    with_learned, with_even = best(prometheus, learned), best(prometheus, even)
    how = "limits 560m : 280m : 140m, batch 960; efficiency = samples/s over the sum of solo rates in the same steps"
    return [
        Figure(
            what="efficiency, learned shares against even ones",
            heterotrain=_of_ceiling(with_learned),
            alternative=_of_ceiling(with_even),
            how=how,
        ),
        Figure(
            what="samples/s",
            heterotrain=f"{with_learned.samples_per_s:.0f}"
            f" ({with_learned.samples_per_s / with_even.samples_per_s:.2f} ×)",
            alternative=f"{with_even.samples_per_s:.0f}",
            how="the same two runs",
        ),
        Figure(
            what="step time",
            heterotrain=f"{with_learned.step_s:.2f} s",
            alternative=f"{with_even.step_s:.2f} s",
            how="the same two runs",
        ),
    ]


def one_epoch(cluster: Cluster) -> list[Figure]:
    """Measure a job of one epoch: shares are learned while it runs, and it has nothing to gain from them later."""
    prepare(cluster)
    learned, even = measure_one_epoch(cluster, "learned"), measure_one_epoch(cluster, "even")
    return [
        Figure(
            what=f"one epoch of {STEPS} steps, {part}",
            heterotrain=f"{with_learned:.1f} s ({1 - with_learned / with_even:.0%} less)",
            alternative=f"{with_even:.1f} s (boundary: Never)",
            how="from the first committed step, by the ranks' own logs; limits 560m : 280m : 140m, batch 448",
        )
        for part, with_learned, with_even in zip(("its first half", "whole"), learned, even, strict=True)
    ]


def _of_ceiling(measured: Efficiency) -> str:
    ratio = measured.efficiency / measured.ceiling
    return f"{measured.efficiency:.3f} = {ratio:.3f} of the ceiling {measured.ceiling:.3f}"


def _train(cluster: Cluster, name: str, training: dict[str, object], arguments: Sequence[str]) -> Run:
    job = start(cluster, name, training, arguments)
    started_s = time.time()
    with Live(job):
        job.wait_true("Succeeded", timeout_s=400)
    return finish(job, started_s, ())


def pauses(cluster: Cluster) -> list[Figure]:
    """Measure the longest gap between two committed steps around an eviction and a SIGKILL, and the usual gap."""
    prepare(cluster)
    found = measure_pauses(cluster)
    return [
        Figure(
            what=f"pause at {name}, three workers",
            heterotrain=_spread(gaps_s),
            alternative=f"{usual_s:.2f} s between any two steps",
            how="gap between the commits before and after, from the ranks' own logs",
        )
        for name, gaps_s, usual_s in found
    ]


def cluster_start(cluster: Cluster) -> list[Figure]:
    """Measure the start of the cluster until all nodes are Ready, with programs and images already built."""
    command = [sys.executable, "-m", "local_cluster"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "deploy/dev/cluster")}
    times_s = []
    for _ in range(3):
        subprocess.run([*command, "down"], env=environment, check=True, capture_output=True)
        began_s = time.monotonic()
        subprocess.run([*command, "up"], env=environment, check=True, capture_output=True)
        times_s.append(time.monotonic() - began_s)
    nodes = len(cluster.list("nodes"))
    return [
        Figure(
            what=f"cluster of {nodes} nodes, cold start",
            heterotrain=_spread(times_s),
            alternative="-",
            how="down, then up until every node is Ready; programs and images already built",
        )
    ]


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s (n={len(seconds)}, {min(seconds):.2f} to {max(seconds):.2f})"


def show(figures: Sequence[Figure], out: Path) -> None:
    """Print the table with date and machine, and write it to ``out/bench.txt``."""
    table = Table(
        title=f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    )
    for heading in ("what", "heterotrain", "alternative", "how"):
        table.add_column(heading)
    for figure in figures:
        table.add_row(figure.what, figure.heterotrain, figure.alternative, figure.how)
    console = Console(record=True, width=150)
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.txt").write_text(console.export_text())


if __name__ == "__main__":
    sys.exit(main())
