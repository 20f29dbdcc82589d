"""``heterotrain validate``."""

from __future__ import annotations

from typing import Any

import click

from heterotrain_cli.cluster.target import target_options
from heterotrain_cli.errors import InputError
from heterotrain_cli.job_file import JobFile, notes, read_checked_job
from heterotrain_cli.output import TABLE, output_option, print_document


@click.command()
@click.argument("path", metavar="JOB.YAML")
@click.option("--cluster", "on_cluster", is_flag=True, help="Let the cluster's API server check it, too (dry run).")
@output_option
@target_options
def validate(*, path: str, on_cluster: bool, output: str, **target: Any) -> None:
    """Check a job without running it; says what is wrong and what to do.

    \b
    Examples:
      heterotrain validate job.yaml
      heterotrain validate job.yaml --cluster -o json

    Exit status: 0 for a valid job; 1 without an answer from the cluster; 2 for a mistake.
    """  # noqa: D301  # click reads the character \b
    try:
        job = read_checked_job(path)
        if on_cluster:
            from heterotrain_cli.cluster.api import cluster_for  # noqa: PLC0415  # a connection needs more than a file

            cluster_for(job.namespace, target).create(job.body, dry_run=True)
    except InputError as error:
        if output != TABLE:
            print_document(validation_document(None, on_cluster=on_cluster, mistake=error.message), output)
        raise
    if output != TABLE:
        print_document(validation_document(job, on_cluster=on_cluster), output)
        return
    for note in notes(job):
        click.echo(f"note: {note}", err=True)
    click.echo(f"job {job.name} is valid")


def validation_document(job: JobFile | None, *, on_cluster: bool, mistake: str | None = None) -> dict[str, Any]:
    """Return what ``heterotrain validate`` says: of a valid job, or of one with a mistake, whose names may be unknown.

    Args:
        job: the valid job; ``None`` with a mistake.
        on_cluster: whether the API server was asked, too.
        mistake: one sentence; ``None`` for a valid job.
    """
    return {
        "valid": mistake is None,
        "mistake": mistake,
        "name": None if job is None else job.name,
        "namespace": None if job is None else job.namespace,
        "checkedByCluster": on_cluster,
        "notes": [] if job is None else list(notes(job)),
    }
