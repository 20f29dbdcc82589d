"""The pause in training when a worker is lost, measured between the commits in the ranks' own logs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from heterotrain_core.contract import env

from lab.cluster import Cluster, wait_for
from lab.jobs import Job, committed_steps, example, fresh_folder
from lab.spot_node import evict, kill

LIMITS = {"a100": "300m", "v100": "300m", "t4": "300m"}
ROUNDS = 3


def measure_pauses(cluster: Cluster) -> list[tuple[str, list[float], float]]:
    """Return for each kind of loss its name, the gaps that it caused, and the usual gap between commits, in seconds."""
    ways: list[tuple[str, Callable[[Job, str], None]]] = [("eviction", evict), ("SIGKILL", kill)]
    return [(name, *_measure(cluster, name.lower(), way)) for name, way in ways]


def _measure(cluster: Cluster, name: str, way: Callable[[Job, str], None]) -> tuple[list[float], float]:
    folder = fresh_folder(f"bench-{name}")
    logs = folder / "samples"
    logs.mkdir()
    logs.chmod(0o777)
    cluster.apply(
        example(
            name,
            arguments=["--samples-per-epoch", "3360"],
            training={"epochs": 40, "globalBatchSize": 168},
            spec={"backoffLimit": 100},
            limits=LIMITS,
            environment={env.SAMPLE_LOG_DIR: "/checkpoints/samples"},
            folder=str(folder),
        )
    )
    job = Job(cluster, name)
    gaps_s = [_one(job, logs, way) for _ in range(ROUNDS)]
    commits = _commits(logs)
    usual_s = statistics.median(later - sooner for sooner, later in pairwise(commits))
    cluster.delete("heterotrainjobs", name)
    return gaps_s, usual_s


def _one(job: Job, logs: Path, way: Callable[[Job, str], None]) -> float:
    """Remove one worker in steady training, return the gap in seconds, and wait for the replacement."""
    job.wait_members(3, timeout_s=120)
    steps = committed_steps(logs) + 8
    wait_for(lambda: committed_steps(logs) >= steps, f"{steps} steps", timeout_s=120)
    pod = wait_for(lambda: job.pod_on("v100"), "a pod to remove", timeout_s=60)["metadata"]
    before = len(_commits(logs))
    way(job, pod["name"])
    wait_for(lambda: len(_commits(logs)) >= before + 8, "steps after the loss", timeout_s=60)
    gap_s = _longest(_commits(logs)[before - 2 : before + 8])

    def replaced() -> bool:
        found = job.pod_on("v100")
        return found is not None and found["metadata"]["uid"] != pod["uid"]

    wait_for(replaced, "the pod to be replaced", timeout_s=90)
    return gap_s


def _commits(folder: Path) -> list[float]:
    """Return the Unix time of each step's first commit, in order."""
    first: dict[int, float] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # still being written
            first[row["step"]] = min(first.get(row["step"], row["at_s"]), row["at_s"])
    return [first[step] for step in sorted(first)]


def _longest(commits: list[float]) -> float:
    return max(later - sooner for sooner, later in pairwise(commits))
