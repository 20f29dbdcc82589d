"""Jobs, workers and events on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from statistics import median
from typing import Any

from heterotrain_operator.api.status import WorkerStatus
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from heterotrain_cli.cluster.api import event_time
from heterotrain_cli.cluster.diagnosis import findings
from heterotrain_cli.cluster.phases import Phases
from heterotrain_cli.cluster.values import UNKNOWN, duration, number, seconds_since, short
from heterotrain_cli.cluster.view import JobSummary, cost, cost_until_end, trained
from heterotrain_cli.terminal import plain_table, state_text

EVENTS = 10
"""Newest events that are shown."""
WORKERS = 30
"""Workers that have a row each; of more, the most urgent ones. The status itself has at most 64."""
TRAINING = "Training"
"""State of a worker that computes its share."""
PHASES = tuple(each.name for each in fields(Phases))
BAR_COLUMNS = 30


def summary(view: JobSummary) -> Table:
    """Return the job's key figures, a line each."""
    status = view.status
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("state", Text.assemble(state_text(status.state), f"  {status.reason}"))
    table.add_row("progress", _progress(view))
    name, done = trained(view)
    steps = f", step {status.step:,}" if status.step is not None and name == "epoch" else ""
    table.add_row(name, f"{done}{steps}")
    if status.loss is not None:
        table.add_row("loss", number(status.loss))
    for name, value in sorted(status.metrics.items()):
        table.add_row(name, number(value))
    table.add_row("speed", _speed(view))
    table.add_row("batch", _batch(view))
    if status.plan.layout is not None:
        table.add_row("layout", Text(status.plan.layout))
    table.add_row(
        "workers",
        f"{status.ready} ready, {counted(status.disruptions, 'disruption')}, {counted(status.restarts, 'failure')}",
    )
    if price := _price(view):
        table.add_row("price", price)
    if status.last_checkpoint is not None:
        ago = duration(seconds_since(status.last_checkpoint.time, view.now))
        table.add_row("checkpoint", f"step {status.last_checkpoint.step:,}, {ago} ago")
    table.add_row("runtime", duration(view.runtime_s))
    return table


def _price(view: JobSummary) -> str:
    """Return the price of an hour, the cost so far and that of the rest; empty for a job without prices."""
    per_hour, rest, so_far = cost(view), cost_until_end(view), view.status.cost
    parts = [f"{per_hour:.2f} an hour"] if per_hour is not None and not view.has_ended else []
    if so_far is not None:
        parts.append(f"{float(so_far):.2f} {'in all' if view.has_ended else 'so far'}")
    if rest is not None and not view.has_ended:
        parts.append(f"about {rest:.2f} until the end")
    if (most := view.body["spec"].get("maxCost")) is not None and parts:
        parts.append(f"at most {most}")
    return ", ".join(parts)


def workers_table(view: JobSummary, phases: Mapping[str, Phases] | None = None) -> Table:
    """Return one row for each worker; of many, those that need attention (``noticed``).

    Args:
        view: the job.
        phases: of workers by name; ``None`` for no columns of phases.
    """
    workers = noticed(view.status.workers)
    table = plain_table("worker")
    for heading in ("pool", "state", "node"):
        table.add_column(heading, no_wrap=True)
    for heading in ("share", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    short = any(each.memory for each in workers)
    if short:
        table.add_column("memory", no_wrap=True)
    for heading in PHASES if phases is not None else ():
        table.add_column(heading, justify="right", no_wrap=True)
    for each in workers:
        table.add_row(
            each.name, each.pool, state_text(each.state), each.node or UNKNOWN, _whole(each.share_samples),
            number(each.samples_per_second), each.binding or UNKNOWN, *([_memory(each)] if short else []),
            *(_phases(phases.get(each.name)) if phases is not None else []),
        )  # fmt: skip
    return table


def _phases(phases: Phases | None) -> list[str]:
    return [UNKNOWN if phases is None else f"{100 * getattr(phases, name):.0f}%" for name in PHASES]


def noticed(workers: Sequence[WorkerStatus]) -> Sequence[WorkerStatus]:
    """Return all workers, or of more than ``WORKERS`` so many that are worth a look.

    First come those that do not train, then those that are slowest for their pool: by their speed divided by the
    median of the pool.
    """
    if len(workers) <= WORKERS:
        return workers
    speeds: dict[str, list[float]] = {}
    for each in workers:
        if each.samples_per_second is not None:
            speeds.setdefault(each.pool, []).append(each.samples_per_second)

    def urgency(worker: WorkerStatus) -> tuple[bool, float]:
        speed = worker.samples_per_second
        relative = 1.0 if speed is None else speed / (median(speeds[worker.pool]) or 1.0)
        return worker.state == TRAINING, relative

    return sorted(workers, key=urgency)[:WORKERS]


def _memory(worker: WorkerStatus) -> str:
    """Return what a worker spares since it ran out of memory; the condition ``MemoryShort`` has its micro-batch."""
    if worker.memory is None:
        return UNKNOWN
    return "recomputes" if worker.memory == "ActivationsRecomputed" else "small batches"


def events_table(events: Sequence[Mapping[str, Any]], now: datetime) -> Table:
    """Return the newest events, one row each."""
    table = plain_table("ago")
    table.add_column("event", no_wrap=True)
    table.add_column("message")
    for each in events[-EVENTS:]:
        warns = each.get("type") == "Warning"
        table.add_row(
            short(seconds_since(event_time(each), now)),
            Text(str(each.get("reason") or ""), style="yellow" if warns else ""),
            Text(" ".join(str(each.get("message") or each.get("note") or "").split())),
        )
    return table


def description(
    view: JobSummary, events: Sequence[Mapping[str, Any]], phases: Mapping[str, Phases] | None = None
) -> RenderableType:
    """Return everything about a job on one page; ``phases`` as for ``workers_table``."""
    parts: list[RenderableType] = [Text(f"{view.namespace}/{view.name}", style="bold"), summary(view), Text()]
    for each in findings(view):
        mark = Text("! ", style="yellow") if each.is_problem else Text("· ", style="dim")
        parts.append(mark + Text(each.what))
    if len(view.status.workers) > WORKERS:
        what = f"{WORKERS} of the workers: those that do not train, then the slowest for their pool"
        parts += [Text(), Text(what, style="dim")]
    if view.status.workers:
        parts += [Text(), workers_table(view, phases)]
    if events:
        parts += [Text(), events_table(events, view.now)]
    return Group(*parts)


def _progress(view: JobSummary) -> RenderableType:
    percentage = view.status.progress_percentage
    if percentage is None:
        return Text(UNKNOWN)
    line = Table.grid(padding=(0, 1, 0, 0))
    left = view.status.estimated_remaining_seconds
    rest = f", {duration(left)} left" if left is not None and not view.has_ended else ""
    line.add_row(ProgressBar(total=100, completed=percentage, width=BAR_COLUMNS), Text(f"{percentage} %{rest}"))
    return line


def _speed(view: JobSummary) -> str:
    status = view.status
    if status.samples_per_second is None:
        return UNKNOWN
    parts = [f"{number(status.samples_per_second)} samples/s"]
    if status.step_seconds is not None:
        parts.append(f"{number(status.step_seconds)} s a step")
    if status.efficiency is not None:
        ceiling = status.plan.efficiency_ceiling
        parts.append(f"efficiency {status.efficiency:.2f}" + (f" of {ceiling:.2f} possible" if ceiling else ""))
    return ", ".join(parts)


def _batch(view: JobSummary) -> str:
    status = view.status
    size = f"{_whole(status.global_batch_size)} samples" if status.global_batch_size is not None else UNKNOWN
    return f"{size} ({status.batch_reason})" if status.batch_reason else size


def counted(number: int, what: str) -> str:
    """Return a count with its noun, such as ``1 failure``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _whole(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"
