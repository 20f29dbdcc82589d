"""``heterotrain describe`` and ``top``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from heterotrain_cli.cluster.api import Cluster, event_time
from heterotrain_cli.cluster.diagnosis import findings
from heterotrain_cli.cluster.names import job_argument
from heterotrain_cli.cluster.phases import phases_of
from heterotrain_cli.cluster.render import description
from heterotrain_cli.cluster.target import Target, target_options
from heterotrain_cli.cluster.view import JobSummary, cost_until_end, view_of
from heterotrain_cli.output import TABLE, output_option, print_document
from heterotrain_cli.terminal import console

_LEAST_INTERVAL_S = 0.2


@click.command()
@job_argument()
@output_option
@target_options
def describe(*, name: str, output: str, **target: Any) -> None:
    """Show one job: progress, speed, what holds it up and what to do, workers, events.

    \b
    Examples:
      heterotrain describe digits
      heterotrain describe digits -o json

    Exit status: 0 with an answer; 1 without an answer from the cluster; 2 for a job that does not exist.
    """  # noqa: D301  # click reads the character \b
    cluster = Cluster(Target(**target))
    view, events = view_of(cluster.job(name)), cluster.events(name)
    if output != TABLE:
        print_document(description_document(view, events), output)
        return
    console().print(description(view, events))


@click.command()
@job_argument()
@click.option("--interval", type=click.FloatRange(_LEAST_INTERVAL_S, 3600), default=2.0, show_default=True,
              help="Seconds between two readings.")  # fmt: skip
@click.option("--prometheus", metavar="ADDRESS",
              help="Shows the parts of each worker's step: URL, or NAMESPACE/SERVICE:PORT.")  # fmt: skip
@target_options
def top(*, name: str, interval: float, prometheus: str | None, **target: Any) -> None:
    """Watch one job until it ends: what describe shows, renewed every few seconds. Ctrl-C ends it.

    Where the output is not a terminal, each page is printed below the one before.

    \b
    Examples:
      heterotrain top digits
      heterotrain top digits --prometheus monitoring/prometheus:9090

    Exit status: 0 when the job has ended or Ctrl-C was pressed; 1 without an answer from the cluster; 2 for a job that
    does not exist.
    """  # noqa: D301  # click reads the character \b
    cluster = Cluster(Target(**target))
    screen = console()

    def look() -> tuple[bool, Any]:
        view = view_of(cluster.job(name))
        uid = str(view.body["metadata"]["uid"])
        phases = phases_of(cluster, prometheus, uid) if prometheus is not None else None
        return view.has_ended, description(view, cluster.events(name), phases)

    has_ended, page = look()
    if not screen.is_terminal:
        screen.print(page)
        while not has_ended:
            time.sleep(interval)
            has_ended, page = look()
            screen.print(page)
        return
    from rich.live import Live  # noqa: PLC0415  # `describe` needs none

    with Live(page, console=screen, auto_refresh=False, screen=True, transient=False) as live:
        try:
            while not has_ended:
                time.sleep(interval)
                has_ended, page = look()
                live.update(page, refresh=True)
        except KeyboardInterrupt:
            pass
    screen.print(page)  # the alternate screen is gone


def description_document(view: JobSummary, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ``heterotrain describe`` says of a job: durations in seconds, unknown values as ``None``."""
    found = findings(view)
    return {
        "name": view.name,
        "namespace": view.namespace,
        "state": view.status.state or "New",
        "reason": view.status.reason,
        "hasProblem": any(each.is_problem for each in found),
        "findings": [{"what": each.what, "isProblem": each.is_problem} for each in found],
        "ageSeconds": view.age_s,
        "runtimeSeconds": view.runtime_s,
        "costUntilEnd": cost_until_end(view),
        "events": [_event(each) for each in events],
        "status": view.body.get("status") or {},
    }


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "time": event_time(event),
        "type": str(event.get("type") or "Normal"),
        "reason": str(event.get("reason") or ""),
        "message": " ".join(str(event.get("message") or event.get("note") or "").split()),
    }
