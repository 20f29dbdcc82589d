"""``heterotrain submit`` and ``wait``."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import click
from heterotrain_core.uris import job_folder
from rich.console import Console

from heterotrain_cli.cluster.api import Cluster, cluster_for
from heterotrain_cli.cluster.diagnosis import findings
from heterotrain_cli.cluster.names import complete_jobs, job_argument
from heterotrain_cli.cluster.target import Target, target_options
from heterotrain_cli.cluster.values import UNKNOWN, duration, number
from heterotrain_cli.cluster.view import JobSummary, trained, view_of
from heterotrain_cli.errors import InputError, UnavailableError
from heterotrain_cli.job_file import read_checked_job
from heterotrain_cli.output import TABLE, output_option, print_document

JOB_FAILED: Final = 3
"""Exit status of a command that waited for a job that failed."""
LINE_S: Final = 10.0
"""Seconds between two lines of progress where there is no terminal."""
LOOK_S: Final = 1.0


@click.command()
@click.argument("path", metavar="JOB.YAML")
@click.option("--wait", "waits", is_flag=True, help="Show the progress until the job ends.")
@click.option(
    "--timeout", type=click.FloatRange(0), metavar="SECONDS", help="With --wait: stop waiting after this time."
)
@click.option(
    "--continue", "earlier", metavar="OLD", shell_complete=complete_jobs,
    help="Continue from the checkpoints of an earlier job.",
)  # fmt: skip
@output_option
@target_options
def submit(*, path: str, waits: bool, timeout: float | None, earlier: str | None, output: str, **target: Any) -> None:
    """Create a job on the cluster. OLD may be deleted; then its folder is looked for below the new checkpoint.uri.

    \b
    Examples:
      heterotrain submit job.yaml
      heterotrain submit job.yaml --continue digits-1
      heterotrain submit job.yaml --wait

    Exit status: 0 when the job is created (with --wait: has succeeded); 1 without an answer from the cluster, or after
    --timeout; 2 for a mistake in the job; 3 when the job has failed.
    """  # noqa: D301  # click reads the character \b
    if timeout is not None and not waits:
        raise click.UsageError("--timeout needs --wait")
    job = read_checked_job(path)
    cluster = cluster_for(job.namespace, target)
    made = cluster.create(job.body if earlier is None else continued(job.body, earlier, cluster.find(earlier)))
    name = str(made["metadata"]["name"])
    click.echo(f"job {name} is created in namespace {cluster.namespace}", err=output != TABLE)
    if waits:
        _wait(cluster, name, timeout_s=timeout, output=output)
    elif output != TABLE:
        print_document(made, output)


@click.command()
@job_argument()
@click.option("--timeout", type=click.FloatRange(0), metavar="SECONDS", help="Stop waiting after this time.")
@output_option
@target_options
def wait(*, name: str, timeout: float | None, output: str, **target: Any) -> None:
    """Show a job's progress until it ends.

    \b
    Example:
      heterotrain wait digits --timeout 3600

    Exit status: 0 when the job has succeeded; 1 without an answer from the cluster, or after --timeout; 2 for a job
    that does not exist; 3 when it has failed.
    """  # noqa: D301  # click reads the character \b
    _wait(Cluster(Target(**target)), name, timeout_s=timeout, output=output)


def continued(body: Mapping[str, Any], name: str, earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a new job that continues from the checkpoints of an earlier one. Pure.

    Args:
        body: the new job.
        name: of the earlier one.
        earlier: it; ``None`` where it is deleted.

    Raises:
        InputError: one of the two keeps no checkpoints.
    """
    for which, spec in (("the new job", body["spec"]), (f"job {name}", (earlier or body)["spec"])):
        if not spec.get("checkpoint"):
            raise InputError(f"{which} keeps no checkpoints, so there is nothing to continue: set spec.checkpoint.uri")
    source = name
    if earlier is not None:
        metadata = earlier["metadata"]
        names = {"namespace": metadata["namespace"], "name": name, "uid": metadata["uid"]}
        source = job_folder(earlier["spec"]["checkpoint"]["uri"], **names)
    found = copy.deepcopy(dict(body))
    found["spec"]["checkpoint"]["resumeFrom"] = source
    return found


def progress_line(view: JobSummary) -> str:
    """Return the job's progress on one line."""
    status = view.status
    if status.samples_per_second is None or status.state in ("", "Pending", "Starting", "Suspended"):
        found = findings(view)
        problem = next((each.what for each in found if each.is_problem), status.reason)
        if status.state == "Suspended" and not any(each.is_problem for each in found):
            problem = found[-1].what
        return f"{status.state or 'New'}, {status.ready} workers ready" + (f": {problem}" if problem else "")
    parts = [
        status.state, f"{status.progress or UNKNOWN}", " ".join(trained(view)), f"loss {number(status.loss)}",
        f"{number(status.samples_per_second)} samples/s", f"{status.ready} workers",
    ]  # fmt: skip
    if status.estimated_remaining_seconds is not None and not view.has_ended:
        parts.append(f"{duration(status.estimated_remaining_seconds)} left")
    if status.cost is not None:
        parts.append(f"cost so far {status.cost}")
    return ", ".join(parts)


def until_ended(
    cluster: Cluster,
    name: str,
    *,
    console: Console | None,
    timeout_s: float | None = None,
    on_view: Callable[[JobSummary], None] = lambda _view: None,
) -> JobSummary:
    """Wait until a job has ended and return it.

    Args:
        cluster: where it runs.
        name: of the job.
        console: shows the progress, as a bar on a terminal, elsewhere as a line every ten seconds; ``None`` for none.
        timeout_s: longest wait in seconds.
        on_view: called with each reading of the job.

    Raises:
        InputError: there is no such job.
        UnavailableError: the cluster does not answer, or the time has passed.
    """
    from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415  # `validate` needs none

    bars = console is not None and (console.is_terminal or console.is_jupyter)
    began_s, lined_s = time.monotonic(), float("-inf")
    columns = (TextColumn("{task.fields[job]}"), BarColumn(), TextColumn("{task.description}"))
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console, transient=True)) if bars else None
        bar = progress.add_task("", total=100, job=name) if progress else None
        while True:
            view = view_of(cluster.job(name))
            on_view(view)
            line = progress_line(view)
            if progress is not None and bar is not None:
                progress.update(bar, completed=view.status.progress_percentage or 0, description=line)
            elif console is not None and time.monotonic() - lined_s >= LINE_S and not view.has_ended:
                click.echo(f"{name}: {line}", err=True)
                lined_s = time.monotonic()
            if view.has_ended:
                return view
            if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                raise UnavailableError(f"job {name} has not ended after {duration(timeout_s)}: it goes on ({line})")
            time.sleep(LOOK_S)


def _wait(cluster: Cluster, name: str, *, timeout_s: float | None, output: str) -> None:
    view = until_ended(cluster, name, console=Console(stderr=True), timeout_s=timeout_s)
    said = f"job {name}: {view.status.state} after {duration(view.runtime_s)}. {view.status.reason}"
    click.echo(said, err=output != TABLE)
    if output != TABLE:
        print_document(view.body, output)
    if view.status.state != "Succeeded":
        raise SystemExit(JOB_FAILED)
