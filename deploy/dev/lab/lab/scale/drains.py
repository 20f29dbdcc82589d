"""``python -m lab.scale.drains``: from a warning that a node ends until the plans let its workers go.

Nodes and pods are simulated (KWOK); API server and operator are real. Each warning reaches all jobs with a worker on
the node. It is timed in this process, from the request until the API server's watch brings the plan.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_operator.kube.resources import JOBS, NODES
from local_cluster import paths, toolchain
from local_cluster.process import Problem, wait_until

from lab.proxy import Api, api, warn
from lab.scale.__main__ import create_all, ready_workers
from lab.scale.place import exporters, replica, running, wait_leads
from lab.scale.workload import Size, job, nodes, teams

KINDS = ("taint", "condition", "deletion")
LONGEST_S = 60.0
FINALIZER = {"metadata": {"finalizers": ["example.com/held"]}}
"""Keeps a Node object after its deletion was asked for, as a cloud's controller does while the machine goes."""


class Plans:
    """The drain list of every job's newest plan, as the API server's watch brings it."""

    def __init__(self, server: Api) -> None:
        self._news: queue.Queue[tuple[float, str, dict[str, Any]]] = queue.Queue()
        self._listed: dict[str, frozenset[str]] = {}
        self._members: dict[str, frozenset[str]] = {}
        self._at_s = 0.0
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()

    def _watch(self, server: Api) -> None:
        for line in server.lines(f"/api/v1/configmaps?watch=1&labelSelector={keys.LABEL_MANAGED_BY}={keys.MANAGED_BY}"):
            at_s, found = time.monotonic(), json.loads(line)["object"]
            plan = json.loads((found.get("data") or {}).get(keys.PLAN_KEY, "{}"))
            name = f"{found['metadata']['namespace']}/{found['metadata']['labels'][keys.LABEL_JOB]}"
            self._news.put((at_s, name, plan))

    def wait(self, wanted: Mapping[str, frozenset[str]], *, since_s: float, listed: bool) -> list[float]:
        """Return for each job the seconds since then until its plan lets all these workers go, or lists none of them.

        Where new members come at the same time, the next plan is without the workers, and lists none.
        """
        times: dict[str, float] = {}
        while len(times) < len(wanted):
            for name in wanted.keys() - times.keys():
                seen = self._listed.get(name, frozenset())
                stay = wanted[name] & self._members.get(name, frozenset()) - seen
                if not stay if listed else not wanted[name] & seen:
                    times[name] = max(0.0, self._at_s - since_s)
            if len(times) < len(wanted) and not self._take(since_s + LONGEST_S - time.monotonic()):
                late = "; ".join(self._compared(name, wanted[name]) for name in sorted(wanted.keys() - times.keys()))
                raise Problem(f"a plan did not follow within {LONGEST_S:.0f} s: {late}")
        return list(times.values())

    def _compared(self, name: str, wanted: frozenset[str]) -> str:
        """Return what was waited for and what a job's newest plan has."""
        listed = sorted(self._listed.get(name, ()))
        return f"{name}: {sorted(wanted)} of {sorted(self._members.get(name, ()))}, listed {listed}"

    def on(self, node: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        """Return by job which of a node's ready workers are members."""
        while self._take(0.0):
            pass
        named = {name: workers & self._members.get(name, frozenset()) for name, workers in node.items()}
        return {name: workers for name, workers in named.items() if workers}

    def _take(self, timeout_s: float) -> bool:
        """Take the next plan; return whether there was one in time."""
        try:
            self._at_s, name, plan = self._news.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return False
        self._listed[name] = frozenset(plan.get("drain", ()))
        self._members[name] = frozenset(rank["worker"] for rank in plan.get("ranks", ()))
        return True


def members(pods: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, frozenset[str]]]:
    """Return by node and job the names of the ready workers."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    for pod in pods:
        ready = any(
            each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ())
        )
        node = pod["spec"].get("nodeName")
        if not ready or not node or "deletionTimestamp" in pod["metadata"]:
            continue
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['labels'][keys.LABEL_JOB]}"
        jobs = found.setdefault(node, {})
        jobs[name] = jobs.get(name, frozenset()) | {pod["metadata"]["name"]}
    return found


def measure(size: Size, rounds: int) -> dict[str, list[float]]:
    """Return the seconds from each warning to each plan, by the kind of warning."""
    draw, times = random.Random(0), {kind: list[float]() for kind in KINDS}  # noqa: S311  # no secret
    folder = Path(tempfile.mkdtemp(prefix="heterotrain-warnings-"))
    with running(folder) as plane, exporters(plane) as (url, _):
        for name in teams():
            plane.kubectl("create", "namespace", name)
        asyncio.run(create_all(plane, NODES, nodes(size)))
        operator = replica(plane, "first", url)
        try:
            operator.start()
            wait_leads(operator, timeout_s=300)
            asyncio.run(create_all(plane, JOBS, (job(number) for number in range(size.jobs))))
            say(f"waiting until {size.jobs} jobs train")
            wait_until(lambda: ready_workers(plane)[1] == size.jobs, "all jobs to train", timeout_s=600, every_s=2)
            environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
            with api(paths.programs() / "kubectl", environment) as server:
                plans, gone = Plans(server), set[str]()
                time.sleep(2)  # the watch begins with the plans that there are
                for number in range(rounds):
                    kind = KINDS[number % len(KINDS)]
                    pods = json.loads(plane.kubectl("get", "pods", "-A", "-o", "json"))["items"]
                    placed = {node: jobs for node, jobs in members(pods).items() if node not in gone}
                    node = draw.choice(sorted(placed))
                    wanted = plans.on(placed[node])
                    if kind == "deletion":
                        gone.add(node)
                        server.send("PATCH", f"/api/v1/nodes/{node}", FINALIZER)
                    since_s = time.monotonic()
                    if kind == "deletion":
                        server.send("DELETE", f"/api/v1/nodes/{node}", {})
                    else:
                        warn(server, node, kind)
                    found = plans.wait(wanted, since_s=since_s, listed=True)
                    times[kind] += found
                    say(
                        f"warning {number + 1} of {rounds} ({kind}): {len(found)} jobs, {max(found, default=0.0):.2f} s"
                    )
                    if kind != "deletion":
                        warn(server, node, kind, is_over=True)
                        plans.wait(wanted, since_s=time.monotonic(), listed=False)
        finally:
            if operator.runs:
                operator.end(signal.SIGKILL)
    return times


def say(text: str) -> None:
    """Print a line about the progress."""
    print(f"    {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and print a table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all programs are ended
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--pods", type=int, default=200, help="in all, shared out over the jobs")
    parser.add_argument("--rounds", type=int, default=45)
    options = parser.parse_args()
    toolchain.build_programs(toolchain.SIMULATOR)
    load = os.getloadavg()[0]
    times = measure(Size(jobs=options.jobs, pods=options.pods), options.rounds)
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, load {load:.1f} to {os.getloadavg()[0]:.1f}, {options.jobs} jobs")
    for kind, values in times.items():
        high = statistics.quantiles(values, n=20, method="inclusive")[-1]
        middle = statistics.median(values)
        print(f"| {kind} | {len(values)} | {middle:.3f} s | {high:.3f} s | {max(values):.3f} s |")


if __name__ == "__main__":
    main()
