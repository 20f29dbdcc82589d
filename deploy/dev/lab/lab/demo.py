"""`make demo`: a job on three pools of different speeds, with even and with learned shares, and a lost spot node."""

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
    """A finished job: its times, its result and the events on the way; ``pools`` holds each worker's pool."""

    name: str
    uid: str
    started_s: float
    ended_s: float
    accuracy: float | None
    pools: Mapping[str, str]
    events: tuple[Event, ...]


def main() -> int:
    """Run the demo and print the path of its picture; on an error print it and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "out/demo", help="folder for the picture and the table"
    )
    arguments = parser.parse_args()
    try:
        cluster = this_cluster(NAMESPACE)
        say("install operator and Prometheus")
        install(cluster)
        prometheus = Prometheus(cluster)
        prepare(cluster)
        say("baseline: the same share for every worker (boundary: Never)")
        even = run_even(cluster)
        say("learned shares; during the job the spot node is lost and comes back")
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
    """Create an empty namespace with the training script, in place of an existing one."""
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
    """Train with learned shares; the spot node is lost in epoch 2 and comes back two epochs later."""
    events: list[Event] = []
    job = start(cluster, "digits", {})
    started_s = time.time()
    with Live(job) as live:

        def note(text: str) -> None:
            events.append(Event(at_s=time.time(), text=text))
            live.say(text)

        job.wait_epoch(2, timeout_s=240)
        pools = job.pools()
        node = spot_node.node_of_pool(cluster, SPOT_POOL)
        note(f"interruption notice for spot node {node}: taint, eviction, power off")
        spot_node.take_away(cluster, node)
        note(f"node {node} is gone")
        job.wait_members(2, timeout_s=60)
        note("the job continues with two workers")
        job.wait_epoch(4, timeout_s=120)
        note(f"node {node} comes back")
        spot_node.give_back(cluster, node)
        job.wait_members(3, timeout_s=90)
        pools |= job.pools()  # now, because the job's end removes the pods
        note("its worker has joined again")
        job.wait_true("Succeeded", timeout_s=240)
    return finish(job, started_s, tuple(events), pools)


def start(
    cluster: Cluster,
    name: str,
    training: Mapping[str, object],
    arguments: Sequence[str] = (),
    spec: Mapping[str, object] | None = None,
) -> Job:
    """Apply the example under another name, with other fields and arguments, and return the job."""
    fresh_folder(name)  # otherwise the job would resume from an earlier demo's checkpoint
    manifest = example(name, training=training, arguments=arguments, spec=spec)
    cluster.apply(manifest)
    return Job(cluster, name)


def finish(job: Job, started_s: float, events: tuple[Event, ...], before: Mapping[str, str] | None = None) -> Run:
    """Return the results of a succeeded job; ``before`` holds the pools of workers that no longer exist."""
    status = job.status()
    time.sleep(1.5)  # until Prometheus has scraped the last steps
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
    """Return the measured efficiency of the shares that the run used for most steps with all its pools.

    Raises:
        ClusterError: Prometheus holds no such steps.
    """
    found = wait_for(lambda: measure(prometheus, run.uid, run.pools) or None, f"telemetry of {run.name}", timeout_s=20)
    return found[0]


def report(prometheus: Prometheus, even: Run, learned: Run, out: Path) -> None:
    """Print the table and draw the picture."""
    rows = [("even shares", even, best(prometheus, even)), ("learned shares", learned, best(prometheus, learned))]
    table = Table(title="Three pools with CPU limits 4 : 2 : 1, measured in this run")
    for heading in ("", "shares", "samples/s", "step", "efficiency", "ceiling", "of ceiling", "test accuracy"):
        table.add_column(heading, justify="right" if heading else "left")
    for title, run, measured in rows:
        by_speed = sorted(measured.rows, key=lambda row: -row.solo_samples_per_s)
        table.add_row(
            title,
            " : ".join(str(row.share_samples) for row in by_speed),
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
    console.print(f"Learned shares train {gain:.2f} times as fast as even shares.")
    console.print("Efficiency: achieved samples/s, divided by the sum of the workers' own rates in the same steps.")
    console.print("Ceiling: the highest efficiency that the workers' own variations allow.")
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
