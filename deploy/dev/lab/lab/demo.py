"""`make demo`: one job on three uneven pools, even and learned shares side by side, a spot node lost and regained."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab import spot_node
from lab.cluster import REPOSITORY, Cluster, ClusterError, wait_for
from lab.efficiency import Efficiency, measure
from lab.install import install, this_cluster
from lab.jobs import Job, example, fresh_folder, script
from lab.live_view import Live
from lab.picture import Event, draw
from lab.telemetry import Prometheus

NAMESPACE = "demo"
SPOT_POOL = "t4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished job, with what it took and what happened on the way; ``pools`` names each worker's pool."""

    name: str
    uid: str
    started_s: float
    ended_s: float
    accuracy: float | None
    pools: Mapping[str, str]
    events: tuple[Event, ...]


def main() -> int:
    """Run the demo and print where its picture is; 1 with one sentence when something does not work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "out/demo", help="folder for the picture and the table"
    )
    arguments = parser.parse_args()
    try:
        cluster = this_cluster(NAMESPACE)
        say("operator and Prometheus")
        install(cluster)
        prometheus = Prometheus(cluster)
        prepare(cluster)
        say("first the baseline: the same shares for all (boundary: Never)")
        even = run_even(cluster)
        say("now learned shares; after a while the cloud takes the spot node away, and gives it back")
        learned = run_learned(cluster)
        report(prometheus, even, learned, arguments.out)
    except (ClusterError, AssertionError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n==> {text}", flush=True)


def prepare(cluster: Cluster) -> None:
    """Start from a clean namespace with the training script in it."""
    cluster.run(
        "kubectl", "delete", "namespace", cluster.namespace, "--ignore-not-found", "--timeout=120s", timeout_s=130
    )
    cluster.run("kubectl", "create", "namespace", cluster.namespace)
    cluster.apply(script())


def run_even(cluster: Cluster) -> Run:
    """Train one epoch with even shares."""
    training = {"epochs": 1, "rebalance": {"boundary": "Never"}}
    job = start(cluster, "digits-even", training, spec={"elasticPolicy": {"minReplicas": 3, "maxReplicas": 3}})
    started_s = time.time()
    with Live(job):
        job.wait_true("Succeeded", timeout_s=240)
    return finish(job, started_s, ())


def run_learned(cluster: Cluster) -> Run:
    """Train with learned shares, lose the spot node in epoch 2 and get it back two epochs later."""
    events: list[Event] = []
    job = start(cluster, "digits", {})
    started_s = time.time()
    with Live(job) as live:

        def happens(text: str) -> None:
            events.append(Event(at_s=time.time(), text=text))
            live.say(text)

        job.wait_epoch(2, timeout_s=240)
        pools = job.pools()
        node = spot_node.node_of_pool(cluster, SPOT_POOL)
        happens(f"spot notice for node {node}: taint, eviction, power off")
        spot_node.take_away(cluster, node)
        happens(f"node {node} is gone")
        job.wait_members(2, timeout_s=60)
        happens("the job goes on with two workers")
        job.wait_epoch(4, timeout_s=120)
        happens(f"node {node} comes back")
        spot_node.give_back(cluster, node)
        job.wait_members(3, timeout_s=90)
        pools |= job.pools()  # what still runs at the end is removed then
        happens("its worker is in again")
        job.wait_true("Succeeded", timeout_s=240)
    return finish(job, started_s, tuple(events), pools)


def start(
    cluster: Cluster,
    name: str,
    training: Mapping[str, object],
    arguments: Sequence[str] = (),
    spec: Mapping[str, object] | None = None,
) -> Job:
    """Apply the example under a name, with fields and arguments of its own, and return it."""
    fresh_folder(name)  # an earlier demo's checkpoint would be resumed
    manifest = example(name, training=training, arguments=arguments, spec=spec)
    cluster.apply(manifest)
    return Job(cluster, name)


def finish(job: Job, started_s: float, events: tuple[Event, ...], before: Mapping[str, str] | None = None) -> Run:
    """Read what a succeeded job reached; ``before`` has the pools of workers that are gone by now."""
    status = job.status()
    time.sleep(1.5)  # one more scrape, so that the last steps are in Prometheus
    return Run(
        name=job.name,
        uid=job.uid(),
        started_s=started_s,
        ended_s=time.time(),
        accuracy=status.get("metrics", {}).get("accuracy"),
        pools={**(before or {}), **job.pools()},
        events=events,
    )


def best(prometheus: Prometheus, run: Run) -> Efficiency:
    """Return the measured efficiency of the split that the run used for most steps with all its pools.

    Raises:
        ClusterError: Prometheus holds no such steps.
    """
    return wait_for(lambda: measure(prometheus, run.uid, run.pools) or None, f"telemetry of {run.name}", timeout_s=20)[
        0
    ]


def report(prometheus: Prometheus, even: Run, learned: Run, out: Path) -> None:
    """Print the table and draw the picture."""
    rows = [("even shares", even, best(prometheus, even)), ("learned shares", learned, best(prometheus, learned))]
    table = Table(title="Three pools, CPU limits 4 : 2 : 1; all measured in this run")
    for heading in ("", "shares", "samples/s", "step", "efficiency", "ceiling", "of ceiling", "test accuracy"):
        table.add_column(heading, justify="right" if heading else "left")
    for title, run, measured in rows:
        table.add_row(
            title,
            " : ".join(
                str(row.share_samples) for row in sorted(measured.rows, key=lambda row: -row.solo_samples_per_s)
            ),
            f"{measured.samples_per_s:.0f}",
            f"{measured.step_s * 1000:.0f} ms",
            f"{measured.efficiency:.3f}",
            f"{measured.ceiling:.3f}",
            f"{measured.efficiency / measured.ceiling:.3f}",
            "-" if run.accuracy is None else f"{run.accuracy:.3f}",
        )
    out.mkdir(parents=True, exist_ok=True)
    console = Console(record=True, width=120)
    console.print(table)
    gain = rows[1][2].samples_per_s / rows[0][2].samples_per_s
    console.print(
        f"Learned shares train {gain:.2f} times as fast as even ones. Efficiency is achieved samples/s over the sum of"
    )
    console.print("the workers' own rates in the same steps; the ceiling is what their own variations allow.")
    (out / "table.txt").write_text(console.export_text())
    picture = out / "demo.png"
    draw(
        prometheus,
        job_uid=learned.uid,
        pools=learned.pools,
        start_s=learned.started_s,
        end_s=learned.ended_s,
        events=learned.events,
        path=picture,
    )
    console.print(f"Picture: {picture}")


if __name__ == "__main__":
    sys.exit(main())
