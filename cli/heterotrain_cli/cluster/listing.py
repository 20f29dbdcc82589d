"""``heterotrain get``: a row for each job, read without the models of a job, which take longer to load than a list."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """What the list says of a job; a value is ``None``, or an empty text, where it is unknown.

    Attributes:
        efficiency: measured throughput over that of workers that never wait, from 0 to 1.
        price_per_hour: a number in the currency of the pools' prices, as text.
    """

    namespace: str
    name: str
    state: str
    ready: str
    progress: str
    samples_per_second: float | None
    efficiency: float | None
    remaining_s: float | None
    price_per_hour: str
    age_s: float | None


def row_of(body: Mapping[str, Any], now: datetime) -> JobRow:
    """Return the row of a job's object; values of another version that have another type are left out."""
    metadata, status = body["metadata"], body.get("status") or {}

    def text(name: str) -> str:
        return found if isinstance(found := status.get(name), str) else ""

    def amount(name: str) -> float | None:
        found = status.get(name)
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            return None
        return float(found)

    state = text("state")
    return JobRow(
        namespace=str(metadata["namespace"]), name=str(metadata["name"]), state=state,
        ready=text("ready") or "0/0", progress=text("progress"), samples_per_second=amount("samplesPerSecond"),
        efficiency=amount("efficiency"), price_per_hour=text("pricePerHour"),
        remaining_s=None if state in ("Succeeded", "Failed") else amount("estimatedRemainingSeconds"),
        age_s=seconds_since(metadata.get("creationTimestamp"), now),
    )  # fmt: skip


def jobs_table(rows: Sequence[JobRow], *, everywhere: bool) -> Table:
    """Return one line for each job; with their namespaces where the list is of all of them."""
    table = plain_table("namespace" if everywhere else "job")
    if everywhere:
        table.add_column("job", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("ready", "progress", "samples/s", "busy", "left", "price/h", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *([row.namespace] if everywhere else []), row.name, state_text(row.state), row.ready,
            row.progress or UNKNOWN, number(row.samples_per_second),
            UNKNOWN if row.efficiency is None else f"{100 * row.efficiency:.0f}%", short(row.remaining_s),
            row.price_per_hour or UNKNOWN, short(row.age_s),
        )  # fmt: skip
    return table


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
    now = datetime.now(UTC)
    console().print(jobs_table([row_of(each, now) for each in found], everywhere=everywhere))
