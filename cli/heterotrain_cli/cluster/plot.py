"""``heterotrain plot``: curves of a job, from Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.history import Arrays, from_prometheus, shares_of
from heterotrain_cli.cluster.layout_picture import draw_layout, layout_of
from heterotrain_cli.cluster.names import job_argument
from heterotrain_cli.cluster.target import Target, target_options
from heterotrain_cli.cluster.view import view_of
from heterotrain_cli.errors import InputError

FORMATS = (".png", ".svg", ".pdf")
MOST_ROWS = 8
_OWN = {"loss": "loss", "samples_per_second": "samples/s", "global_batch_size": "batch (samples)"}
_FROM_ZERO = frozenset({"samples_per_second", "global_batch_size"})
_MOST_NAMED = 16
"""Workers that the legend names."""
_NOT_DRAWN = frozenset({"time_s", "epoch", "step", "samples", "noise_scale_samples"})


@click.command()
@job_argument()
@click.option("-o", "--output", metavar="FILE", required=True, help="Picture to write: .png, .svg or .pdf.")
@click.option("--prometheus", metavar="ADDRESS", default="monitoring/prometheus:9090", show_default=True,
              help="NAMESPACE/SERVICE:PORT, reached through the API server, or a URL.")  # fmt: skip
@click.option("--every", type=click.FloatRange(1, 86_400), default=15.0, show_default=True, metavar="SECONDS",
              help="Time between two points.")  # fmt: skip
@click.option("--layout", is_flag=True,
              help="Draw the stages of members instead: units over workers, time of each pass, bubbles.")  # fmt: skip
@target_options
def plot(*, name: str, output: str, prometheus: str, every: float, layout: bool, **target: Any) -> None:
    """Draw loss, throughput, batch, shares and the script's own metrics of a job over time, or its layout.

    \b
    Examples:
      heterotrain plot digits -o digits.png
      heterotrain plot digits -o digits.svg --prometheus http://localhost:9090
      heterotrain plot gpt -o stages.png --layout

    Exit status: 0 with a picture; 1 without an answer from the cluster or Prometheus; 2 for a job that does not exist
    or has no measurements.
    """  # noqa: D301  # click reads the character \b
    if Path(output).suffix not in FORMATS:
        raise InputError(f"{output} has no known format: end it with one of {', '.join(FORMATS)}")
    cluster = Cluster(Target(**target))
    if layout:
        drawn = draw_layout(layout_of(cluster, prometheus, name), Path(output))
        click.echo(f"{output}: {drawn}")
        return
    view = view_of(cluster.job(name))
    arrays = from_prometheus(cluster, prometheus, view, every_s=every)
    if not arrays or not len(arrays["time_s"]):
        raise InputError(f"Prometheus has no measurements of job {name}: check that it scrapes the workers")
    draw(name, arrays, Path(output), shares_of(cluster, prometheus, view, every_s=every))
    click.echo(f"{output}: {len(arrays['time_s'])} points")


def with_throughput(arrays: Arrays) -> Arrays:
    """Return the arrays with ``samples_per_second``, from the committed samples; NaN where a step was taken back."""
    if "samples" not in arrays or len(arrays["time_s"]) < 2:  # noqa: PLR2004  # a slope needs two points
        return arrays
    known = ~np.isnan(arrays["samples"])
    rate: NDArray[np.float64] = np.full(len(known), np.nan)
    passed, done = np.diff(arrays["time_s"][known]), np.diff(arrays["samples"][known])
    rate[np.flatnonzero(known)[1:]] = np.where((done >= 0) & (passed > 0), done / np.maximum(passed, 1e-9), np.nan)
    return {**arrays, "samples_per_second": rate}


def draw(name: str, arrays: Arrays, output: Path, shares: Mapping[str, Arrays]) -> None:
    """Write a picture with one row for each metric, and one with the shares of all workers.

    Args:
        name: of the job.
        arrays: its metrics over time.
        output: the file.
        shares: by worker, times and samples of a step.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  # takes a second to load

    every = with_throughput(arrays)
    own = [key for key in _OWN if key in every]
    rows = [*own, *sorted(key for key in every if key not in _OWN and key not in _NOT_DRAWN)][:MOST_ROWS]
    minutes = (every["time_s"] - every["time_s"][0]) / 60
    count = max(1, len(rows) + bool(shares))
    figure = Figure(figsize=(9, 1 + 1.8 * count), layout="constrained")
    axes = figure.subplots(count, sharex=True, squeeze=False)[:, 0]
    for axis, key in zip(axes, rows, strict=False):
        known = ~np.isnan(every[key])
        axis.plot(minutes[known], every[key][known], marker="." if known.sum() < 50 else "")  # noqa: PLR2004  # few points
        axis.set_ylabel(_OWN.get(key, key))
        axis.grid(alpha=0.3)
        if key in _FROM_ZERO:
            axis.set_ylim(bottom=0)
    if shares:
        _draw_shares(axes[len(rows)], shares, begin_s=float(every["time_s"][0]))
    axes[0].set_title(name)
    axes[-1].set_xlabel("minutes")
    try:
        figure.savefig(output)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}") from error


def _draw_shares(axis: Any, shares: Mapping[str, Arrays], *, begin_s: float) -> None:
    """Draw a line for each worker, with gaps where it did not train."""
    times_s = np.unique(np.concatenate([each["time_s"] for each in shares.values()]))
    for worker, each in shares.items():
        share = np.full(len(times_s), np.nan)
        share[np.searchsorted(times_s, each["time_s"])] = each["share"]
        axis.plot((times_s - begin_s) / 60, share, label=worker, drawstyle="steps-post")
    axis.set_ylabel("share (samples)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if len(shares) <= _MOST_NAMED:
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
