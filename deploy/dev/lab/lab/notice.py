"""From the warning that a node ends to its worker's departure, on the real cluster, with the node's end 15 s later.

``python -m lab.notice`` prints a table. The times are read in this process: before the warning is sent, and when the
API server's watch and the pod's log bring the news.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterotrain.data.sample_log import lineage
from heterotrain_core.contract import env, keys
from local_cluster import control

from lab import spot_node
from lab.cluster import REPOSITORY, Cluster, wait_for
from lab.install import install, this_cluster
from lab.jobs import Job, committed_steps, example, fresh_folder, script
from lab.proxy import Api, api, warn

POOLS = ("t4", "v100", "a100")
EPOCH_SAMPLES = 3360
LIMITS = dict.fromkeys(POOLS, "300m")
WINDOW_S = 15.0
READ = re.compile(r"plan (\d+)\.(\d+):")


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """One announced end.

    Attributes:
        how: the kind of warning, ``taint`` or ``condition``.
        listed_s: seconds from the warning until the plan that names the worker is in the cluster.
        read_s: seconds until that worker has read it.
        left_s: seconds until the worker's process has ended.
    """

    how: str
    listed_s: float
    read_s: float
    left_s: float


def depart(server: Api, job: Job, pool: str, how: str) -> Departure:
    """Announce the end of the pool's node, and return when plan, worker and process followed."""
    node, pod = spot_node.node_of_pool(job.cluster, pool), str(named(job, pool))
    base = f"/api/v1/namespaces/{job.cluster.namespace}"
    news: queue.Queue[tuple[str, float, tuple[int, int]]] = queue.Queue()

    def watch() -> None:
        for line in server.lines(f"{base}/configmaps?watch=1&fieldSelector=metadata.name={keys.plan_name(job.name)}"):
            at_s, plan = time.monotonic(), json.loads(json.loads(line)["object"]["data"][keys.PLAN_KEY])
            news.put(("ready", at_s, (0, 0)))
            if pod in plan.get("drain", ()):
                news.put(("listed", at_s, (plan["generation"], plan["revision"])))
                return

    def follow() -> None:
        for line in server.lines(f"{base}/pods/{pod}/log?follow=true&tailLines=1"):
            found = READ.search(line.decode(errors="replace"))
            news.put(("read" if found else "ready", time.monotonic(), _pair(found)))
        news.put(("left", time.monotonic(), (0, 0)))

    for each in (watch, follow):
        threading.Thread(target=each, daemon=True).start()
    ready = [news.get(timeout=30) for _ in range(2)]  # both answer with what there is already
    assert all(kind in ("ready", "read") for kind, *_ in ready), ready  # noqa: S101  # a bug of this program
    began_s = time.monotonic()
    warn(server, node, how)
    times: dict[str, float] = {}
    reads: dict[tuple[int, int], float] = {}
    version = (0, 0)
    while "left" not in times:
        kind, at_s, about = news.get(timeout=60)
        if kind == "listed":
            version = about
        if kind == "read":
            reads[about] = at_s
        times.setdefault(kind, at_s)
    read_s = min((at_s for about, at_s in reads.items() if about >= version), default=times["left"])
    return Departure(
        how=how, listed_s=times["listed"] - began_s, read_s=read_s - began_s, left_s=times["left"] - began_s
    )


def _pair(found: re.Match[str] | None) -> tuple[int, int]:
    return (int(found[1]), int(found[2])) if found else (0, 0)


def named(job: Job, pool: str) -> str:
    """Return the name of the pool's running pod."""
    return str(wait_for(lambda: job.pod_on(pool), f"a pod on {pool}", timeout_s=120)["metadata"]["name"])


def repeated(job: Job) -> float:
    """Return the number of steps that any worker has repeated."""
    total = 0.0
    for pod in filter(None, map(job.pod_on, POOLS)):
        path = f"/api/v1/namespaces/{job.cluster.namespace}/pods/{pod['metadata']['name']}:{keys.METRICS_PORT}/proxy"
        metrics = job.cluster.kubectl("get", "--raw", f"{path}/metrics")
        total += sum(map(float, re.findall(r"^heterotrain_repeated_steps_total{[^}]*} (\S+)$", metrics, re.MULTILINE)))
    return total


def measure(cluster: Cluster, *, rounds: int, windows: int) -> None:
    """Warn of the end of nodes, with and without the end itself, and print what was measured."""
    folder = fresh_folder("notice")
    (folder / "samples").mkdir()
    (folder / "samples").chmod(0o777)
    manifest = example(
        "notice", arguments=["--samples-per-epoch", str(EPOCH_SAMPLES), "--until", "/checkpoints/enough"],
        training={"epochs": 1_000_000, "globalBatchSize": 336}, limits=LIMITS,
        environment={env.SAMPLE_LOG_DIR: "/checkpoints/samples"}, folder=str(folder),
    )  # fmt: skip
    manifest["spec"]["template"]["spec"]["containers"][0]["command"][1] = "/script/open_ended.py"
    own = script()
    own["data"]["open_ended.py"] = (REPOSITORY / "deploy/dev/lab/training/open_ended.py").read_text()
    cluster.apply(own, manifest)
    job = Job(cluster, "notice")

    def steady() -> None:
        job.wait_members(3, timeout_s=180)
        steps = committed_steps(folder / "samples") + 4
        wait_for(lambda: committed_steps(folder / "samples") >= steps, f"{steps} steps", timeout_s=120)

    found: list[Departure] = []
    ended: list[Departure] = []
    again = 0.0
    with api("kubectl", cluster.environment) as server:
        for number in range(rounds):
            steady()
            how, pool = ("taint", "condition")[number % 2], POOLS[number % 3]
            try:
                found.append(depart(server, job, pool, how))
            finally:
                warn(server, spot_node.node_of_pool(cluster, pool), how, is_over=True)
            print(found[-1], flush=True)
        for number in range(windows):
            steady()
            before, pool = repeated(job), POOLS[number % 3]
            node = spot_node.node_of_pool(cluster, pool)
            ends_s = time.monotonic() + WINDOW_S
            try:
                ended.append(depart(server, job, pool, "taint"))
                time.sleep(max(0.0, ends_s - time.monotonic()))
                control.power_off(node)
                steps = committed_steps(folder / "samples") + 4
                wait_for(lambda: committed_steps(folder / "samples") >= steps, "steps after the end", timeout_s=60)  # noqa: B023  # called at once
                again += repeated(job) - before
            finally:
                spot_node.give_back(cluster, node)
            print("with its end", ended[-1], flush=True)
    (folder / "enough").touch()
    job.wait_true("Succeeded", timeout_s=120)
    epochs = lineage(folder / "samples")
    last = max(epochs)
    whole = all(sorted(ids) == list(range(EPOCH_SAMPLES)) for epoch, ids in epochs.items() if epoch != last)
    status = job.status()
    show(found + ended)
    print(
        f"{len(ended)} nodes ended {WINDOW_S:.0f} s after their warning: the last worker had left after "
        f"{max((each.left_s for each in ended), default=0.0):.2f} s, {again:.0f} steps repeated; {len(epochs)} epochs, "
        f"every sample once: {whole}; disruptions {status['disruptions']}, restarts {status['restarts']}"
    )
    cluster.delete(keys.PLURAL, job.name)


def show(departures: Sequence[Departure]) -> None:
    """Print the distribution of each time, in seconds."""
    parts: dict[str, Callable[[Departure], float]] = {
        "warning to plan": lambda each: each.listed_s,
        "warning to the worker's reading": lambda each: each.read_s,
        "warning to the process' end": lambda each: each.left_s,
    }
    for how in ("taint", "condition"):
        for name, part in parts.items():
            times = sorted(part(each) for each in departures if each.how == how)
            if len(times) > 1:
                high = statistics.quantiles(times, n=20, method="inclusive")[-1]
                middle = statistics.median(times)
                print(f"{how:10} {name:32} n={len(times)} median {middle:.2f} p95 {high:.2f} max {times[-1]:.2f}")


def main() -> int:
    """Run the measurement on the cluster that is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="warnings that are taken back")
    parser.add_argument("--windows", type=int, default=6, help="warnings after which the node ends; at most two a node")
    parser.add_argument("--installed", action="store_true", help="operator and Prometheus are there already")
    options = parser.parse_args()
    cluster = this_cluster("bench-notice")
    if not options.installed:
        install(cluster)
    cluster.run("kubectl", "create", "namespace", cluster.namespace)
    try:
        measure(cluster, rounds=options.rounds, windows=options.windows)
    finally:
        cluster.run("kubectl", "delete", "namespace", cluster.namespace, timeout_s=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
