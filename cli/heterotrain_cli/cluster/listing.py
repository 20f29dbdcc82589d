"""``heterotrain get``: a row for each job, read without the models of a job, which take longer to load than a list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import click
from rich.table import Table

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.names import job_argument
from heterotrain_cli.cluster.target import Target, target_options
from heterotrain_cli.cluster.values import UNKNOWN, number, seconds_since, short
from heterotrain_cli.output import TABLE, output_option, print_document
from heterotrain_cli.terminal import console, plain_table, say, state_text


def jobs_table(bodies: Iterable[Mapping[str, Any]], now: datetime, *, everywhere: bool) -> Table:
    """Return one line for each job; with their namespaces where the list is of all of them."""
    table = plain_table("namespace" if everywhere else "job")
    if everywhere:
        table.add_column("job", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("ready", "progress", "samples/s", "busy", "left", "price/h", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    for body in bodies:
        namespace, name, state, *figures = cells_of(body, now)
        table.add_row(*([namespace] if everywhere else []), name, state_text(state), *figures)
    return table


def cells_of(body: Mapping[str, Any], now: datetime) -> list[str]:
    """Return namespace, name, state and the figures of a job's object; a dash for what is unknown.

    Values of another version of the operator that have another type are unknown.
    """
    metadata, status = body["metadata"], body.get("status") or {}

    def text(name: str) -> str:
        return found if isinstance(found := status.get(name), str) else ""

    def amount(name: str) -> float | None:
        found = status.get(name)
        if not isinstance(found, int | float) or isinstance(found, bool):
            return None
        with suppress(OverflowError):  # a whole number beyond all floats
            return float(found) if math.isfinite(found) else None
        return None

    state, efficiency = text("state"), amount("efficiency")
    left_s = None if state in ("Succeeded", "Failed") else amount("estimatedRemainingSeconds")
    return [
        str(metadata["namespace"]), str(metadata["name"]), state, text("ready") or "0/0",
        text("progress") or UNKNOWN, number(amount("samplesPerSecond")),
        UNKNOWN if efficiency is None else f"{100 * efficiency:.0f}%", short(left_s),
        text("pricePerHour") or UNKNOWN, short(seconds_since(metadata.get("creationTimestamp"), now)),
    ]  # fmt: skip


@click.command()
@job_argument(required=False)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Jobs of all namespaces.")
@output_option
@target_options
def get(*, name: str | None, everywhere: bool, output: str, **target: Any) -> None:
    """List jobs, or one job, with speed, progress and price.

    \b
    Examples:
      heterotrain get
      heterotrain get -A
      heterotrain get digits -o yaml

    Exit status: 0 with an answer; 1 without an answer from the cluster; 2 for a job that does not exist.
    """  # noqa: D301  # click reads the character \b
    if name is not None and everywhere:
        raise click.UsageError("a name and --all-namespaces exclude each other: remove one of them")
    cluster = Cluster(Target(**target))
    found = [cluster.job(name)] if name is not None else cluster.jobs(everywhere=everywhere)
    if output != TABLE:
        print_document(found[0] if name is not None else {"apiVersion": "v1", "kind": "List", "items": found}, output)
        return
    if not found:
        where = "any namespace" if everywhere else f"namespace {cluster.namespace}"
        say(console(), f"no jobs in {where}")
        return
    console().print(jobs_table(found, datetime.now(UTC), everywhere=everywhere))
