"""``make bench-scale``: the operator with a thousand jobs and ten thousand pods, and the loss of its leader.

Nodes and pods are simulated (KWOK), and so is the telemetry of every rank, from a stand-in for Prometheus. Everything
else is real: etcd, API server, scheduler, controller manager, and two replicas of the operator with the chart's rights.
The jobs together request more workers than the nodes can hold, so one
allocation decides about all of them.
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
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.engine.queue import Priority
from heterotrain_operator.engine.resync import list_foreign, relist
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.resources import JOBS, NODES, PODS, Resource
from heterotrain_operator.kube.verbs import Body
from local_cluster import toolchain
from local_cluster.bare import ControlPlane
from local_cluster.process import say, wait_until

from lab.scale.exporters import SCRAPE_S
from lab.scale.place import Replica, cpu_s, exporters, peak_mib, quantile, replica, running, wait_leads
from lab.scale.workload import Size, job, nodes, teams

PARALLEL_CREATES = 16
LOOK_S = 10.0
LONGEST_S = 1800.0
SETTLED = 0.99
"""Part of all places and jobs that have to be ready and training at the same time. With telemetry, the allocation goes
on moving workers between jobs, so not all of them ever are at once."""
TRAINING = ("Running", "Degraded", "Resizing")
"""States in which a job trains; in the last one, members of its present plan go on while others join or leave."""
NAMESPACES = Resource("v1", "namespaces")


@dataclass(slots=True)
class Row:
    """A row of the result: the measured quantity, its value, and the target."""

    what: str
    value: str
    target: str = ""


async def create_all(plane: ControlPlane, resource: Resource, bodies: Iterable[Body]) -> None:
    """Create objects in parallel, as fast as the API server accepts them."""
    kube = KubeClient(await load_configuration(str(plane.kubeconfig)))
    limit = asyncio.Semaphore(PARALLEL_CREATES)

    async def one(body: Body) -> None:
        async with limit:
            await kube.create(resource, body)

    try:
        await asyncio.gather(*(one(body) for body in bodies))
    finally:
        await kube.close()


def ready_workers(plane: ControlPlane) -> tuple[int, int]:
    """Return the numbers of ready workers and of jobs that train, from the jobs' status."""
    lines = plane.kubectl("get", "htj", "--all-namespaces", "--no-headers").splitlines()
    rows = [line.split() for line in lines]
    ready = sum(int(row[3].partition("/")[0]) for row in rows if len(row) > 3 and "/" in row[3])  # noqa: PLR2004  # READY
    return ready, sum(row[2] in TRAINING for row in rows)


async def ready_pods(plane: ControlPlane) -> int:
    """Return the number of ready pods in the API server."""
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


async def first_view(plane: ControlPlane) -> Row:
    """Fill an empty store as a new replica does, and measure it."""
    kube, store = KubeClient(await load_configuration(str(plane.kubeconfig))), Store()
    started_s = time.monotonic()
    try:
        await relist(kube, store)
        await list_foreign(kube, store)
    finally:
        await kube.close()
    took_s = time.monotonic() - started_s
    count = sum(len(kind) for kind in (store.nodes.all(), store.jobs.all(), store.pods.all(), store.plans.all()))
    return Row(f"a first complete view, of {count:,} objects", seconds(took_s), "≤ 5 s for 9,000")


def fill(plane: ControlPlane, size: Size, leader: Replica, standby: Replica, *, longest_s: float) -> list[Row]:
    """Create all jobs at once, and wait until nearly every slot has a ready worker and nearly every job trains.

    On a machine that is too slow for that, the rows say how far it came, and the measurements after it go on.
    """
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
        say(f"    {took_s:4.0f} s: {ready:6,} of {size.slots:,} workers ready, {training:5,} of {size.jobs:,} training")
        if ready >= SETTLED * size.slots and training >= SETTLED * size.jobs:
            break
        if took_s > longest_s:
            break
        time.sleep(LOOK_S)
    complete = ready >= SETTLED * size.slots and training >= SETTLED * size.jobs
    real = asyncio.run(ready_pods(plane))
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    metrics = leader.metrics()
    passes = sum(value for name, value in metrics.items() if name.startswith("heterotrain_operator_reconcile_total"))
    assert leader.process is not None  # noqa: S101  # it was started
    peak = max(peak_mib(each.process.pid) for each in (leader, standby) if each.process is not None)
    rows = [
        Row(
            f"{size.jobs:,} jobs to {real:,} ready pods",
            f"{took_s:.0f} s" if complete else f"not in {took_s:.0f} s: {training:,} jobs train",
            "≤ 240 s",
        ),
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
        Row("waiting for a pass, p99: urgent, changed, routine", waits(metrics)),
        Row(
            "an allocation over all jobs, longest", longest(metrics, "heterotrain_operator_allocation_duration_seconds")
        ),
        Row("passes per job", f"{passes / size.jobs:.0f}"),
        Row("pods created per slot", f"{metrics['heterotrain_operator_pods_created_total'] / size.slots:.2f}"),
        Row("plans written per job", f"{metrics['heterotrain_operator_plans_written_total'] / size.jobs:.1f}"),
    ]
    total_s = sum(used.values())
    rows += [
        Row(f"processor time: {name}", f"{spent_s:.0f} s, {spent_s / total_s:.0%}")
        for name, spent_s in sorted(used.items(), key=lambda item: -item[1])
    ]
    return rows


def with_news(leader: Replica, size: Size, *, for_s: float = 60.0) -> list[Row]:
    """Return the operator's cost while every job delivers telemetry every few seconds."""
    assert leader.process is not None  # noqa: S101  # it was started
    before_s, before = cpu_s(leader.process.pid), leader.metrics()
    time.sleep(for_s)
    after = leader.metrics()
    used = (cpu_s(leader.process.pid) - before_s) / for_s
    since = {name: value - before.get(name, 0.0) for name, value in after.items()}
    reads = since['heterotrain_operator_telemetry_reads_total{result="ok"}'] / for_s
    passes = sum(value for name, value in since.items() if name.startswith("heterotrain_operator_reconcile_total"))
    delay = "heterotrain_operator_event_loop_delay_seconds"
    return [
        Row(f"telemetry of {size.jobs:,} jobs each {SCRAPE_S:.0f} s: the leader", f"{used:.0%} of a core", "≤ 100%"),
        Row("… reads of a job's telemetry, passes", f"{reads:.0f} and {passes / for_s:.0f} a second"),
        Row(
            "… a pass over one job, p99",
            seconds(quantile(since, "heterotrain_operator_reconcile_duration_seconds", 0.99)),
            "≤ 1 s",
        ),
        Row("… deciding alone, p99", seconds(quantile(since, "heterotrain_operator_decision_duration_seconds", 0.99))),
        Row("… waiting for a pass, p99: urgent, changed, routine", waits(since)),
        Row("… event loop late by, p99", seconds(quantile(since, delay, 0.99)), "≤ 0.05 s"),
        Row("… event loop late by, longest", longest(since, delay)),
    ]


def suspend(plane: ControlPlane, number: int) -> Callable[[], bool]:
    """Suspend a job, and return a function that reports the deletion of its pods, which needs an active operator."""
    team, name = job(number)["metadata"]["namespace"], f"job-{number}"
    plane.kubectl("-n", team, "patch", "htj", name, "--type=merge", "-p", json.dumps({"spec": {"suspend": True}}))
    return lambda: not plane.kubectl("-n", team, "get", "pods", "-l", f"{keys.LABEL_JOB}={name}", "-o", "name").strip()


def until(done: Callable[[], bool], what: str, started_s: float) -> float:
    """Return the seconds from ``started_s`` until ``done`` holds."""
    wait_until(done, what, timeout_s=300, every_s=0.1)
    return time.monotonic() - started_s


def crash(plane: ControlPlane, leader: Replica, number: int) -> Row:
    """Kill the leader, suspend a job, and measure the time until the stand-by has acted on it."""
    started_s = time.monotonic()
    leader.end(signal.SIGKILL)
    acts_s = until(suspend(plane, number), "the suspended job's end", started_s)
    return Row("new leader acts after a crash", seconds(acts_s), "≤ 15 s")


def hand_over(plane: ControlPlane, leader: Replica, number: int) -> Row:
    """End the leader as a rollout does, suspend a job, and measure the time until the other replica has acted on it."""
    started_s = time.monotonic()
    leader.end(signal.SIGTERM)
    acts_s = until(suspend(plane, number), "the suspended job's end", started_s)
    return Row("new leader acts after a planned end", seconds(acts_s), "≤ 3 s")


def restart(plane: ControlPlane, one: Replica, size: Size, number: int) -> list[Row]:
    """Restart the only replica, and measure the time until it acts."""
    one.end(signal.SIGKILL)
    done = suspend(plane, number)
    started_s = time.monotonic()
    one.start()
    leads_s = wait_leads(one)
    acts_s = until(done, "the suspended job's end", started_s)
    wait_handled(one, size)
    return [
        Row("restart of a single replica: leads after (the old Lease expires first)", seconds(leads_s)),
        Row("… acts after", seconds(acts_s)),
        Row("… has made as many passes as there are jobs after", seconds(time.monotonic() - started_s)),
    ]


def wait_handled(one: Replica, size: Size) -> None:
    """Wait until a new leader has made as many passes as there are jobs: its queue is never empty, as news go on."""

    def handled() -> bool:
        metrics = one.metrics().items()
        found = sum(each for name, each in metrics if name.startswith("heterotrain_operator_reconcile_total"))
        return found >= size.jobs

    wait_until(handled, f"{size.jobs} passes", timeout_s=300, every_s=0.5)


def outage(plane: ControlPlane, one: Replica, size: Size, number: int, *, for_s: float) -> list[Row]:
    """Stop the API server and start it again; restart the operator as a kubelet would."""
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
    wait_handled(one, size)
    ready, training = ready_workers(plane)
    return [
        Row(f"API server away for {for_s:.0f} s: the leader stops acting after", seconds(gave_up_s)),
        Row("… acts after the API server is ready again", seconds(acts_s)),
        Row("… ready workers and training jobs afterwards", f"{ready:,}, {training:,}"),
    ]


def seconds(value: float) -> str:
    """Return seconds for a table."""
    return f"{value:.3f} s" if value < 1 else f"{value:.1f} s"


def waits(metrics: dict[str, float]) -> str:
    """Return how long jobs wait in the queue, for each priority."""
    name, found = "heterotrain_operator_queue_duration_seconds", []
    for priority in Priority:
        any_waited = metrics[f'{name}_count{{priority="{priority}"}}'] > 0
        labels = f',priority="{priority}"'
        found.append(seconds(quantile(metrics, name, 0.99, labels=labels)) if any_waited else "none")
    return "; ".join(found)


def longest(metrics: dict[str, float], name: str) -> str:
    """Return the bucket of a histogram's largest value."""
    largest_s = quantile(metrics, name, 1.0)
    return "beyond the last bucket" if largest_s == float("inf") else f"≤ {seconds(largest_s)}"


def measure(plane: ControlPlane, size: Size, *, outage_s: float, fill_s: float) -> Iterator[Row]:
    """Yield each result as soon as it is measured."""
    for name in teams():
        plane.kubectl("create", "namespace", name)
    asyncio.run(create_all(plane, NODES, nodes(size)))

    def ready() -> bool:
        return plane.kubectl("get", "nodes", "--no-headers").count(" Ready ") == sum(size.nodes.values())

    wait_until(ready, "nodes", timeout_s=120, every_s=1)
    say(f"    {sum(size.nodes.values()):,} nodes are ready")
    with exporters(plane) as (url, _):
        yield from with_operators(plane, size, url, outage_s=outage_s, fill_s=fill_s)


def with_operators(plane: ControlPlane, size: Size, url: str, *, outage_s: float, fill_s: float) -> Iterator[Row]:
    """Yield what two replicas do: they fill the cluster, use its telemetry, and take over from each other."""
    first, second = replica(plane, "first", url), replica(plane, "second", url)
    try:
        first.start()
        wait_leads(first)
        second.start()
        yield from fill(plane, size, first, second, longest_s=fill_s)
        yield from with_news(first, size)
        yield asyncio.run(first_view(plane))
        yield crash(plane, first, 0)
        wait_handled(second, size)
        first.start()
        wait_until(lambda: first.ready, "the stand-by to be ready, as in a rollout", timeout_s=120)
        yield hand_over(plane, second, 1)
        wait_handled(first, size)
        yield from restart(plane, first, size, 2)
        if outage_s:
            yield from outage(plane, first, size, 3, for_s=outage_s)
    finally:
        for each in (first, second):
            if each.runs:
                each.end(signal.SIGKILL)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that all started processes are stopped


def main() -> None:
    """Run the measurements and print the table."""
    parser = argparse.ArgumentParser(prog="make bench-scale", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--outage-seconds", type=float, default=60.0, help="0 skips the outage of the API server")
    parser.add_argument("--fill-seconds", type=float, default=LONGEST_S, help="longest wait until all jobs train")
    parser.add_argument("--keep", action="store_true", help="keep logs and data")
    options = parser.parse_args()
    size = Size(jobs=options.jobs, pods=options.pods)
    toolchain.build_programs(toolchain.SIMULATOR)
    load = os.getloadavg()[0]
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, load before {load:.1f}, "
        f"{size.slots:,} slots on {sum(size.nodes.values()):,} nodes\n\n"
        "| what | measured | target |\n| --- | ---: | ---: |"
    )
    folder = Path(tempfile.mkdtemp(prefix="heterotrain-scale-"))
    signal.signal(signal.SIGTERM, _interrupt)
    with running(folder) as plane:
        for row in measure(plane, size, outage_s=options.outage_seconds, fill_s=options.fill_seconds):
            print(f"| {row.what} | {row.value} | {row.target} |", flush=True)
    if not options.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
