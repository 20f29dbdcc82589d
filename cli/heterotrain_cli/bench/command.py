"""``heterotrain bench``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from heterotrain_core.extras import missing_extra
from heterotrain_planner.perf.counters import Observation
from rich.console import Console

from heterotrain_cli.bench import environment
from heterotrain_cli.bench.ranks import BenchRun, measure
from heterotrain_cli.bench.result import ScalingRow, as_document, profile, table
from heterotrain_cli.errors import InputError
from heterotrain_cli.output import TABLE, output_option, print_document
from heterotrain_cli.terminal import plain_table, say

MOST_WORKERS = 64
BUSY_LOAD = 0.5
"""Load average at the start, over cores, above which the figures are doubtful."""


def _counts(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_WORKERS for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of numbers from 1 to {MOST_WORKERS}, such as 1,2,4")
    return tuple(sorted({1, *map(int, parts)}))


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--batch", type=click.IntRange(1, 10_000_000), required=True, metavar="SAMPLES",
              help="Global batch; with --weak, the batch of each worker.")  # fmt: skip
@click.option("--workers", "counts", default="1,2,4,8", show_default=True, callback=_counts, metavar="N,N…",
              help="Numbers of workers; 1 is always measured.")  # fmt: skip
@click.option("--weak", is_flag=True, help="Keep the batch of each worker (weak scaling) instead of the global batch.")
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=10.0, show_default=True,
              help="Length of each measurement.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(1, 86_400), default=600.0, show_default=True, metavar="SECONDS",
              help="Longest time of one run, with its start.")  # fmt: skip
@click.option("--precision", type=click.Choice(["auto", "fp32", "bf16", "fp16"]), default="auto", show_default=True)
@click.option("--compression", type=click.Choice(["none", "fp16", "bf16"]), default="none", show_default=True)
@click.option("--pool", metavar="NAME", help="Name in the profile  [default: that of the device]")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default="bench", show_default=True,
              help="Folder for the results.")  # fmt: skip
@output_option
def bench(
    *, script: str, arguments: tuple[str, ...], batch: int, counts: tuple[int, ...], weak: bool, seconds: float,
    timeout: float, precision: str, compression: str, pool: str | None, folder: Path, output: str,
) -> None:  # fmt: skip
    """Measure how a script scales on this machine: one worker, two, four and so on.

    Each worker is a process with a GPU of its own, or with an equal part of the cores. The options here replace those
    of the script's `heterotrain.init`; no checkpoint is read or written. Options of the script follow after `--`.

    The folder gets bench.json (figures and environment), scaling.png, profile.yaml for `heterotrain forecast
    --profile`, and the logs. Its times come from one worker alone, with several batches.

    \b
    Examples:
      heterotrain bench train.py --batch 512
      heterotrain bench train.py --batch 512 --folder results -o json
      heterotrain bench train.py --batch 64 --weak --workers 1,2,4 -- --width 44

    Exit status: 0 with a table; 2 for a script or an option that cannot be used.
    """  # noqa: D301  # click reads the character \b
    if not weak and batch < max(counts):
        raise InputError(f"--batch {batch} is too small for {max(counts)} workers: each needs at least one sample")
    try:
        about = environment.record()
        gpus = environment.gpus()
        name = pool or environment.device_name()
    except ModuleNotFoundError as error:
        raise InputError(missing_extra(error, what="heterotrain bench", extra="cli,trainer") or str(error)) from error
    console = Console(stderr=output != TABLE)
    if gpus and (too_many := [count for count in counts if count > gpus]):
        say(console, f"{', '.join(map(str, too_many))} workers are left out: this machine has {gpus} GPUs")
        counts = tuple(count for count in counts if count <= gpus)
    folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, about["cores"] // max(counts))

    def measured(ranks: int, samples: int, what: str) -> list[Observation]:
        click.echo(f"measuring {what} …", err=True)
        run = BenchRun(
            ranks=ranks, batch_samples=samples, threads=threads, precision=precision, compression=compression
        )
        return measure([script, *arguments], run, seconds=seconds, timeout_s=timeout, folder=folder)

    rows, (found, why) = _measured(measured, name, batch, counts, weak=weak)
    if output == TABLE:
        _show(console, rows)
    _warn(console, about, crowded=not gpus and max(counts) > about["cores"])
    settings = {
        "script": script, "arguments": list(arguments), "scaling": "weak" if weak else "strong", "seconds": seconds,
        "precision": precision, "compression": compression, "threads": threads,
    }  # fmt: skip
    document = {"settings": settings, "environment": about, "rows": [as_document(row) for row in rows]}
    _write(console, folder, document, found, why)
    draw(rows, folder / "scaling.png", weak=weak)
    if output != TABLE:
        print_document({**document, "profile": found, "profileReason": why}, output)


def _measured(
    measured: Callable[[int, int, str], list[Observation]], name: str, batch: int, counts: Sequence[int], *, weak: bool
) -> tuple[list[ScalingRow], tuple[dict[str, Any] | None, str]]:
    """Measure all numbers of workers, then one worker with smaller batches; return the rows, and the profile."""
    runs = []
    for count in counts:
        samples = batch * count if weak else batch
        runs.append((count, samples, measured(count, samples, f"{count} workers" if count > 1 else "1 worker")))
    smaller = sorted({max(1, batch // part) for part in ((2, 4) if weak else counts[1:] or (2, 4))} - {batch})
    solo = [runs[0][2]] + [measured(1, each, f"1 worker with a batch of {each}") for each in reversed(smaller)]
    return table(runs), profile(name, solo, [(count, seen) for count, _, seen in runs if count > 1])


def _warn(console: Console, about: Mapping[str, Any], *, crowded: bool) -> None:
    if about["load"][0] > BUSY_LOAD * about["cores"]:
        say(console, f"other programs used the machine (load {about['load'][0]:.1f} at the start): repeat it when idle")
    if crowded:
        say(console, f"more workers than the {about['cores']} cores of this machine slow each other down")


def _write(console: Console, folder: Path, document: Any, found: dict[str, Any] | None, why: str) -> None:
    (folder / "bench.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if found is None:
        say(console, f"no profile: {why}")
        return
    (folder / "profile.yaml").write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")
    say(console, f"{folder}: bench.json, scaling.png, profile.yaml ({why})")


def draw(rows: Sequence[ScalingRow], path: Path, *, weak: bool) -> None:
    """Write a picture of speed-up and efficiency over workers, next to perfect scaling."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # takes a second to load

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    workers = [row.workers for row in rows]
    left.plot(workers, workers, color="grey", linestyle=":", label="perfect")
    left.plot(workers, [row.speed_up for row in rows], marker="o", label="measured")
    left.set(xlabel="workers", ylabel="speed-up", title="weak scaling" if weak else "strong scaling", xticks=workers)
    left.legend()
    right.axhline(1.0, color="grey", linestyle=":")
    right.plot(workers, [row.efficiency for row in rows], marker="o")
    right.set(xlabel="workers", ylabel="scaling efficiency", ylim=(0, 1.1), xticks=workers)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _show(console: Console, rows: Sequence[ScalingRow]) -> None:
    found = plain_table("workers")
    for heading in ("batch", "step", "samples/s", "speed-up", "efficiency"):
        found.add_column(heading, justify="right")
    for row in rows:
        found.add_row(
            str(row.workers), str(row.batch_samples), f"{row.step_s:.4g} s", f"{row.samples_per_s:.4g}",
            f"{row.speed_up:.2f}", f"{row.efficiency:.2f}",
        )  # fmt: skip
    console.print(found)
