"""Predicted step times beside measured ones: the table of `make bench-prediction`, and how far predictions miss."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Some shares: seconds of a step as predicted from everything, from the learning epoch alone, and as measured.

    ``error_s`` is the standard error of ``measured_s``; ``pace_ratio`` how many times as long as predicted steps with known
    shares took meanwhile.
    """

    shares: tuple[int, ...]
    predicted_s: float
    early_s: float
    measured_s: float
    error_s: float
    pace_ratio: float


def show(rows: Sequence[Row], out: Path) -> None:
    """Print the table and the medians, and write both to ``out/prediction.txt``."""
    table = Table(title="Step times of shares that were not used before: predicted, then measured")
    headings = (
        "batch",
        "shares",
        "measured",
        "predicted",
        "off",
        "at its pace",
        "off",
        "from the learning epoch",
        "off",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(sum(row.shares)),
            " : ".join(map(str, row.shares)),
            f"{row.measured_s:.3f} s ± {row.error_s / row.measured_s:.1%}",
            f"{row.predicted_s:.3f} s",
            f"{row.predicted_s / row.measured_s - 1:+.1%}",
            f"{row.predicted_s * row.pace_ratio:.3f} s",
            f"{row.predicted_s * row.pace_ratio / row.measured_s - 1:+.1%}",
            f"{row.early_s:.3f} s",
            f"{row.early_s / row.measured_s - 1:+.1%}",
        )
    console = Console(record=True, width=150)
    console.print(table)
    console.print(f"predicted: {_misses([row.predicted_s / row.measured_s for row in rows])}")
    known = [abs(1 / row.pace_ratio - 1) for row in rows]
    console.print(
        f"known shares meanwhile: off by {statistics.median(known):.1%} in the median, at most {max(known):.1%}"
    )
    console.print(
        "relative to known shares that took turns: "
        f"{_misses([row.predicted_s * row.pace_ratio / row.measured_s for row in rows])}"
    )
    console.print(f"from the learning epoch alone: {_misses([row.early_s / row.measured_s for row in rows])}")
    off = [math.log(row.predicted_s / row.measured_s) for row in rows]
    ratios = [abs(math.expm1(one - other)) for one, other in zip(off[::2], off[1::2], strict=True)]
    console.print(
        f"predicted ratio of the two vectors that took turns: off by {statistics.median(ratios):.1%} in the median, at most "
        f"{max(ratios):.1%}"
    )
    beyond = sum(abs(row.predicted_s - row.measured_s) > 2 * row.error_s for row in rows)
    console.print(
        f"the yardstick: a standard error of {statistics.median(row.error_s / row.measured_s for row in rows):.1%} in the "
        f"median; {beyond} of {len(rows)} predictions miss by more than two of them; five minutes' load {os.getloadavg()[1]:.1f} "
        f"on {os.cpu_count()} processors"
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "prediction.txt").write_text(console.export_text())


def _misses(ratios: Sequence[float]) -> str:
    """Say how far predictions are off, and how far without the factor that all of them share: the machine's drift."""
    errors = [abs(ratio - 1) for ratio in ratios]
    common = math.exp(statistics.median(map(math.log, ratios)))
    rest = statistics.median(abs(ratio / common - 1) for ratio in ratios)
    return (
        f"off by {statistics.median(errors):.1%} in the median, at most {max(errors):.1%}; "
        f"of that {common - 1:+.1%} for all alike, and {rest:.1%} in the median without it"
    )
