"""``make bench-scale``: the operator with a thousand jobs and ten thousand pods, and what happens when its leader goes.

Nodes and pods are simulated (KWOK), everything else is real: etcd, API server, scheduler, controller manager, and two
replicas of the operator with the chart's rights. More workers are wanted than there are places, so every job is part of
one allocation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from heterotrain_core.contract import keys
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.resources import JOBS, NODES, PODS, Resource
from heterotrain_operator.kube.verbs import Body
from local_cluster import toolchain
from local_cluster.bare import ControlPlane
from local_cluster.process import Problem, say, wait_until

from lab.scale.place import Replica, cpu_s, peak_mib, quantile, replica, running, wait_leads
from lab.scale.workload import Size, job, nodes, teams

PARALLEL_CREATES = 16
LOOK_S = 5.0
LONGEST_S = 900.0
STANDING_BY_S = 15.0
"""A stand-by has seen everything by then, as in a roll-out."""
NAMESPACES = Resource("v1", "namespaces")


@dataclass(slots=True)
class Row:
    """A line of the result: what was measured, and the target beside it."""

    what: str
    value: str
    target: str = ""


async def create_all(plane: ControlPlane, resource: Resource, bodies: Iterable[Body]) -> None:
    """Create objects, some at a time, as fast as the API server takes them."""
    kube = KubeClient(await load_configuration(str(plane.kubeconfig)))
    gate = asyncio.Semaphore(PARALLEL_CREATES)

    async def one(body: Body) -> None:
        async with gate:
            await kube.create(resource, body)

    try:
        await asyncio.gather(*(one(body) for body in bodies))
    finally:
        await kube.close()


def ready_workers(plane: ControlPlane) -> tuple[int, int]:
    """Return ready workers over all jobs, and jobs that train, as the jobs' status says."""
    lines = plane.kubectl("get", "htj", "--all-namespaces", "--no-headers").splitlines()
    rows = [line.split() for line in lines]
    ready = sum(int(row[3].partition("/")[0]) for row in rows if len(row) > 3 and "/" in row[3])  # noqa: PLR2004  # READY
    return ready, sum(row[2] in ("Running", "Degraded") for row in rows)


async def ready_pods(plane: ControlPlane) -> int:
    """Return the workers that the API server itself calls ready."""
    kube = KubeClient(await load_configuration(str(plane.kubeconfig)))
    try:
        count = 0
        async for pod in kube.list(PODS, labels=f"{keys.LABEL_MANAGED_BY}={keys.MANAGED_BY}"):
            conditions = pod["status"].get("conditions", ())
            ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
            count += ready and "deletionTimestamp" not in pod["metadata"]
        return count
    finally:
        await kube.close()


def fill(plane: ControlPlane, size: Size, leader: Replica, standby: Replica) -> list[Row]:
    """Create all jobs at once and watch until every place has a ready worker and every job trains."""
    pids = {name: process.pid for name, process in plane.processes.items()}
    pids |= {
        f"operator, {role}": each.process.pid
        for role, each in (("leader", leader), ("stand-by", standby))
        if each.process is not None
    }
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    started_s = time.monotonic()
    asyncio.run(create_all(plane, JOBS, (job(number) for number in range(size.jobs))))
    created_s = time.monotonic() - started_s
    say(f"    {size.jobs} jobs created in {created_s:.0f} s")
    while True:
        ready, training = ready_workers(plane)
        took_s = time.monotonic() - started_s
        say(
            f"    {took_s:4.0f} s: {ready:6,} of {size.places:,} workers ready, {training:5,} of {size.jobs:,} jobs train"
        )
        if ready >= size.places and training == size.jobs:
            break
        if took_s > LONGEST_S:
            raise Problem(f"not all ready after {LONGEST_S:.0f} s: {plane.folder}/*.log")
        time.sleep(LOOK_S)
    real = asyncio.run(ready_pods(plane))
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    metrics = leader.metrics()
    passes = sum(value for name, value in metrics.items() if name.startswith("heterotrain_operator_reconcile_total"))
    assert leader.process is not None  # noqa: S101  # it was started
    peak = max(peak_mib(each.process.pid) for each in (leader, standby) if each.process is not None)
    rows = [
        Row(f"{size.jobs:,} jobs to {real:,} ready pods", f"{took_s:.0f} s", "≤ 240 s"),
        Row("operator's memory, peak", f"{peak:.0f} MiB", "≤ 300 MiB"),
        Row(
            "a pass over one job, p99",
            seconds(quantile(metrics, "heterotrain_operator_reconcile_duration_seconds", 0.99)),
            "≤ 1 s",
        ),
        Row(
            "a pass over one job, median",
            seconds(quantile(metrics, "heterotrain_operator_reconcile_duration_seconds", 0.5)),
        ),
        Row("deciding alone, p99", seconds(quantile(metrics, "heterotrain_operator_decision_duration_seconds", 0.99))),
        Row(
            "an allocation over all jobs, longest", longest(metrics, "heterotrain_operator_allocation_duration_seconds")
        ),
        Row("passes, for each job", f"{passes / size.jobs:.0f}"),
        Row("pods created, for each place", f"{metrics['heterotrain_operator_pods_created_total'] / size.places:.2f}"),
        Row("plans written, for each job", f"{metrics['heterotrain_operator_plans_written_total'] / size.jobs:.1f}"),
    ]
    total_s = sum(used.values())
    rows += [
        Row(f"processor time: {name}", f"{spent_s:.0f} s, {spent_s / total_s:.0%}")
        for name, spent_s in sorted(used.items(), key=lambda item: -item[1])
    ]
    return rows


def rest(leader: Replica, *, for_s: float = 20.0) -> list[Row]:
    """Return what the operator costs while nothing happens."""
    assert leader.process is not None  # noqa: S101  # it was started
    time.sleep(for_s)  # the last numbers of every status are written some seconds later
    before_s, before = cpu_s(leader.process.pid), leader.metrics()
    time.sleep(for_s)
    name = 'heterotrain_operator_reconcile_total{result="ok"}'
    passes = leader.metrics()[name] - before[name]
    used = (cpu_s(leader.process.pid) - before_s) / for_s
    return [Row("operator at rest", f"{used:.1%} of a core, {passes / for_s:.1f} passes/s")]


def suspend(plane: ControlPlane, number: int) -> Callable[[], bool]:
    """Suspend a job; return whether its pods have been told to go, which only an operator that acts does."""
    team, name = job(number)["metadata"]["namespace"], f"job-{number}"
    plane.kubectl("-n", team, "patch", "htj", name, "--type=merge", "-p", json.dumps({"spec": {"suspend": True}}))
    return lambda: not plane.kubectl("-n", team, "get", "pods", "-l", f"{keys.LABEL_JOB}={name}", "-o", "name").strip()


def until(done: Callable[[], bool], what: str, started_s: float) -> float:
    """Return the seconds from ``started_s`` until something holds."""
    wait_until(done, what, timeout_s=300, every_s=0.1)
    return time.monotonic() - started_s


def crash(plane: ControlPlane, leader: Replica, number: int) -> Row:
    """Kill the leader, ask for something, and time until a stand-by has done it."""
    started_s = time.monotonic()
    leader.end(signal.SIGKILL)
    return Row(
        "new leader acts after a crash", seconds(until(suspend(plane, number), "the suspended job's end", started_s)), "≤ 15 s"
    )  # fmt: skip


def hand_over(plane: ControlPlane, leader: Replica, number: int) -> Row:
    """End the leader as a roll-out does, ask for something, and time until the other replica has done it."""
    started_s = time.monotonic()
    leader.end(signal.SIGTERM)
    return Row(
        "new leader acts after a planned end", seconds(until(suspend(plane, number), "the suspended job's end", started_s)), "≤ 3 s"
    )  # fmt: skip


def start_anew(plane: ControlPlane, one: Replica, number: int) -> list[Row]:
    """Start the only replica with everything to learn, and time until it acts."""
    one.end(signal.SIGKILL)
    done = suspend(plane, number)
    started_s = time.monotonic()
    one.start()
    leads_s = wait_leads(one)
    acts_s = until(done, "the suspended job's end", started_s)
    wait_idle(one)
    return [
        Row("a single replica that starts: leads after (the old Lease runs out first)", seconds(leads_s)),
        Row("… acts after", seconds(acts_s)),
        Row("… has looked at every job after", seconds(time.monotonic() - started_s)),
    ]


def wait_idle(one: Replica) -> None:
    """Wait until nothing waits for a pass."""
    wait_until(
        lambda: one.metrics().get("heterotrain_operator_workqueue_depth") == 0, "an empty queue", timeout_s=300, every_s=0.5
    )  # fmt: skip


def outage(plane: ControlPlane, one: Replica, number: int, *, for_s: float) -> list[Row]:
    """Take the API server away and bring it back; the operator is started anew as a kubelet would do it."""
    plane.stop("kube-apiserver", by=signal.SIGKILL)
    ended_s = time.monotonic()
    wait_until(lambda: not one.runs, "the leader to give up without its Lease", timeout_s=for_s)
    gave_up_s = time.monotonic() - ended_s
    one.start()
    time.sleep(max(0.0, for_s - (time.monotonic() - ended_s)))
    plane.start("kube-apiserver")
    plane.wait_ready()
    started_s = time.monotonic()
    acts_s = until(suspend(plane, number), "the suspended job's end", started_s)
    wait_idle(one)
    ready, training = ready_workers(plane)
    return [
        Row(f"API server away for {for_s:.0f} s: the leader stops acting after", seconds(gave_up_s)),
        Row("… acts after the API server is ready again", seconds(acts_s)),
        Row("… workers ready, jobs that train, then", f"{ready:,}, {training:,}"),
    ]


def seconds(value: float) -> str:
    """Return seconds for a table."""
    return f"{value:.3f} s" if value < 1 else f"{value:.1f} s"


def longest(metrics: dict[str, float], name: str) -> str:
    """Return the bucket of a histogram's largest value."""
    return f"≤ {seconds(quantile(metrics, name, 1.0))}"


def measure(plane: ControlPlane, size: Size, *, outage_s: float) -> Iterator[Row]:
    """Yield everything that is measured, as soon as it is known."""
    for name in teams():
        plane.kubectl("create", "namespace", name)
    asyncio.run(create_all(plane, NODES, nodes(size)))

    def ready() -> bool:
        return plane.kubectl("get", "nodes", "--no-headers").count(" Ready ") == sum(size.nodes.values())

    wait_until(ready, "nodes", timeout_s=120, every_s=1)
    say(f"    {sum(size.nodes.values()):,} nodes are ready")
    first, second = replica(plane, "first"), replica(plane, "second")
    try:
        first.start()
        wait_leads(first)
        second.start()
        yield from fill(plane, size, first, second)
        wait_idle(first)
        yield from rest(first)
        yield crash(plane, first, 0)
        wait_idle(second)
        first.start()
        wait_until(lambda: first.metrics() != {}, "the stand-by", timeout_s=60)
        time.sleep(STANDING_BY_S)
        yield hand_over(plane, second, 1)
        wait_idle(first)
        yield from start_anew(plane, first, 2)
        if outage_s:
            yield from outage(plane, first, 3, for_s=outage_s)
    finally:
        for each in (first, second):
            if each.runs:
                each.end(signal.SIGKILL)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that nothing that was started runs on


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="make bench-scale", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--outage-seconds", type=float, default=60.0, help="0 leaves the API server alone")
    parser.add_argument("--keep", action="store_true", help="keep logs and data")
    options = parser.parse_args()
    size = Size(jobs=options.jobs, pods=options.pods)
    toolchain.build_programs(toolchain.SIMULATOR)
    load = os.getloadavg()[0]
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, load before {load:.1f}, "
        f"{size.places:,} places on {sum(size.nodes.values()):,} nodes\n\n| what | measured | target |\n| --- | ---: | ---: |"
    )
    folder = Path(tempfile.mkdtemp(prefix="heterotrain-scale-"))
    signal.signal(signal.SIGTERM, _interrupt)
    with running(folder) as plane:
        for row in measure(plane, size, outage_s=options.outage_seconds):
            print(f"| {row.what} | {row.value} | {row.target} |", flush=True)
    if not options.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
