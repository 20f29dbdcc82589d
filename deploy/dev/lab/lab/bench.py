"""`make bench`: measures on the real cluster, each figure beside its alternative, and prints one table.

Nothing here is asserted: a table is for people, and times differ from machine to machine.
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
from lab.delivery import measure_delivery
from lab.demo import Run, best, finish, prepare, start
from lab.efficiency import Efficiency
from lab.install import install, this_cluster
from lab.live_view import Live
from lab.pauses import measure_pauses
from lab.telemetry import Prometheus

BATCH = 960
EPOCH_SAMPLES = 24 * BATCH
"""24 steps an epoch: about 25 s at the sum of the limits of 0.98 cores and 1 ms a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table: what was measured, ours, the alternative's, and how."""

    what: str
    ours: str
    alternative: str
    how: str


def main() -> int:
    """Measure the chosen parts, print the table, and write it to ``--out``."""
    parts: dict[str, Callable[[Cluster], Sequence[Figure]]] = {
        "efficiency": efficiency,
        "delivery": delivery,
        "pauses": pauses,
        "start": cluster_start,  # last: it takes the cluster down and up again
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="what to measure; everything when none is named")
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
    """Even shares and learned ones, one after the other, at steps of a second and more."""
    prepare(cluster)
    prometheus = Prometheus(cluster)
    arguments = ["--samples-per-epoch", str(EPOCH_SAMPLES)]
    even = _train(
        cluster, "even", {"epochs": 1, "globalBatchSize": BATCH, "rebalance": {"boundary": "Never"}}, arguments
    )
    learned = _train(cluster, "learned", {"epochs": 4, "globalBatchSize": BATCH}, arguments)
    ours, theirs = best(prometheus, learned), best(prometheus, even)
    how = "limits 560m : 280m : 140m, batch 960; efficiency = samples/s over the sum of solo rates in the same steps"
    return [
        Figure(
            what="efficiency, learned shares against even ones", ours=_share(ours), alternative=_share(theirs), how=how
        ),
        Figure(
            what="samples/s",
            ours=f"{ours.samples_per_s:.0f} ({ours.samples_per_s / theirs.samples_per_s:.2f} ×)",
            alternative=f"{theirs.samples_per_s:.0f}",
            how="the same two runs",
        ),
        Figure(
            what="step time", ours=f"{ours.step_s:.2f} s", alternative=f"{theirs.step_s:.2f} s", how="the same two runs"
        ),
    ]


def _share(measured: Efficiency) -> str:
    return f"{measured.efficiency:.3f} = {measured.efficiency / measured.ceiling:.3f} of the ceiling {measured.ceiling:.3f}"


def _train(cluster: Cluster, name: str, training: dict[str, object], arguments: Sequence[str]) -> Run:
    job = start(cluster, name, training, arguments)
    started_s = time.time()
    with Live(job):
        job.wait_true("Succeeded", timeout_s=400)
    return finish(job, started_s, ())


def delivery(cluster: Cluster) -> list[Figure]:
    """A changed ConfigMap until the pod reads it: with the annotation touched, and left to the kubelet."""
    prepare(cluster)
    touched_s, left_s = measure_delivery(cluster, touched=10, left=3)
    return [
        Figure(
            what="plan written until a pod can read it",
            ours=_spread(touched_s),
            alternative=_spread(left_s) + " (plain file refresh)",
            how="one pod that polls its mounted file every 10 ms; write and read on one clock",
        )
    ]


def pauses(cluster: Cluster) -> list[Figure]:
    """The longest gap between two committed steps around an eviction and a SIGKILL, beside the usual gap."""
    prepare(cluster)
    found = measure_pauses(cluster)
    return [
        Figure(
            what=f"pause at {name}, three workers",
            ours=_spread(gaps_s),
            alternative=f"{usual_s:.2f} s between any two steps",
            how="gap between the commits before and after, from the ranks' own logs",
        )
        for name, gaps_s, usual_s in found
    ]


def cluster_start(cluster: Cluster) -> list[Figure]:
    """The cluster from nothing to all nodes Ready, images in place."""
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
            ours=_spread(times_s),
            alternative="-",
            how="down, then up until every node is Ready; binaries and images in place",
        )
    ]


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s (n={len(seconds)}, {min(seconds):.2f} to {max(seconds):.2f})"


def show(figures: Sequence[Figure], out: Path) -> None:
    """Print the table, and write it with date and machine to ``out/bench.txt``."""
    table = Table(
        title=f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    )
    for heading in ("what", "heterotrain", "alternative", "how"):
        table.add_column(heading)
    for figure in figures:
        table.add_row(figure.what, figure.ours, figure.alternative, figure.how)
    console = Console(record=True, width=150)
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.txt").write_text(console.export_text())


if __name__ == "__main__":
    sys.exit(main())
