"""``heterotrain logs``: the logs of all workers of a job, line by line."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import click

from heterotrain_cli.cluster.api import Cluster, LogLine
from heterotrain_cli.cluster.names import complete_workers, job_argument
from heterotrain_cli.cluster.target import Target, target_options
from heterotrain_cli.cluster.view import view_of
from heterotrain_cli.errors import InputError, UnavailableError

COLOURS: Final = ("cyan", "magenta", "yellow", "green", "blue", "red")
LOOK_S: Final = 1.0
"""Seconds between two looks for new workers while following."""
MOST_LINES: Final = 10_000
"""Lines that wait for the terminal; a reader of a log waits when there are more."""


Read = Callable[[Mapping[str, Any]], Iterator[LogLine]]
"""Yields the lines of a pod's log."""


@click.command()
@job_argument()
@click.argument("workers", nargs=-1, metavar="[WORKER]...", shell_complete=complete_workers)
@click.option("-f", "--follow", is_flag=True, help="Wait for new lines and new workers until the job ends.")
@click.option("--tail", type=click.IntRange(0), help="Lines from the end of each worker's log  [default: all]")
@click.option("--since", type=click.IntRange(1), metavar="SECONDS", help="Only lines of the last SECONDS.")
@click.option("--previous", is_flag=True, help="The log of the container before its last restart.")
@click.option("--container", metavar="NAME", help="Container of the pods  [default: the one that trains]")
@target_options
def logs(
    *,
    name: str,
    workers: tuple[str, ...],
    follow: bool,
    tail: int | None,
    since: int | None,
    previous: bool,
    container: str | None,
    **target: Any,
) -> None:
    """Print the logs of all workers of a job, each line with the worker's name.

    WORKER is the name of a pod, or its end, such as w3.

    \b
    Examples:
      heterotrain logs digits -f
      heterotrain logs digits w0 --tail 50

    Exit status: 0 when all lines are printed; 1 without an answer from the cluster; 2 for a job or a worker that does
    not exist.
    """  # noqa: D301  # click reads the character \b
    cluster = Cluster(Target(**target))
    cluster.job(name)  # a wrong name is refused here, and not taken for a job without workers
    pods = chosen(cluster.pods(name), workers, job=name)
    if not pods and not follow:
        raise InputError(f"job {name} has no workers at present: `heterotrain describe {name}` tells why")
    width = max((len(pod["metadata"]["name"]) for pod in pods), default=0)

    def read(pod: Mapping[str, Any]) -> Iterator[LogLine]:
        return cluster.log_lines(pod, container, follow=follow, tail=tail, previous=previous, since_s=since)

    if not follow:
        for pod in pods:
            for line in read(pod):
                _print(line, width)
        return
    with suppress(KeyboardInterrupt):
        for line in followed(cluster, name, workers, read):
            width = max(width, len(line.worker))
            _print(line, width)


def chosen(pods: Iterable[Mapping[str, Any]], workers: tuple[str, ...], *, job: str) -> list[Mapping[str, Any]]:
    """Return the pods with these names, or all.

    Raises:
        InputError: a name fits no pod.
    """
    every = list(pods)
    names = [str(pod["metadata"]["name"]) for pod in every]
    wanted = set()
    for worker in workers:
        full = worker if worker in names else f"{job}-{worker}"
        if full not in names:
            there = ", ".join(names) or "none"
            raise InputError(f"job {job} has no worker {worker}: there are {there}")
        wanted.add(full)
    return [pod for pod, name in zip(every, names, strict=True) if not workers or name in wanted]


def has_log(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod's containers have started."""
    return (pod.get("status") or {}).get("phase") not in (None, "Pending")


def followed(cluster: Cluster, name: str, workers: tuple[str, ...], read: Read) -> Iterator[LogLine]:
    """Yield lines of all workers, of those that join later, too, until the job has ended and all lines are out.

    Args:
        cluster: where the job runs.
        name: of the job.
        workers: names of pods, or their ends, such as w3; empty for all.
        read: yields the lines of one pod's log.
    """
    lines: queue.Queue[LogLine] = queue.Queue(MOST_LINES)
    running: dict[str, threading.Thread] = {}

    def follow_one(pod: Mapping[str, Any]) -> None:
        try:
            for line in read(pod):
                lines.put(line)
        except (InputError, UnavailableError) as error:
            lines.put(LogLine(str(pod["metadata"]["name"]), f"({error.message})"))

    ended, looked_s = False, 0.0
    while True:
        if not ended and time.monotonic() - looked_s >= LOOK_S:
            looked_s = time.monotonic()
            ended = view_of(cluster.job(name)).has_ended
            for pod in cluster.pods(name):
                uid, worker = str(pod["metadata"]["uid"]), str(pod["metadata"]["name"])
                wanted = not workers or worker in workers or worker.removeprefix(f"{name}-") in workers
                if uid not in running and wanted and has_log(pod):
                    running[uid] = threading.Thread(target=follow_one, args=(pod,), daemon=True)
                    running[uid].start()
        try:
            line = lines.get(timeout=LOOK_S / 4)
        except queue.Empty:
            if ended and not any(thread.is_alive() for thread in running.values()):
                return
            continue
        yield line


def _print(line: LogLine, width: int) -> None:
    tail = line.worker.rpartition("-w")[2]
    colour = COLOURS[int(tail) % len(COLOURS)] if tail.isdecimal() else COLOURS[0]
    click.echo(f"{click.style(line.worker.ljust(width), fg=colour)} {line.text}")
