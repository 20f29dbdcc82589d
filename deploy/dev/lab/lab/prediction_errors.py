"""Predicted and measured step times: the table of `make bench-prediction`, and the errors of the predictions."""

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
    """Seconds of a step with given shares: predicted from all data and from the learning epoch alone, and measured.

    ``error_s`` is the standard error of ``measured_s``. ``pace_ratio`` is the measured over the predicted time of steps
    with known shares in the same period.
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
    table.add_column("batch", justify="right")
    table.add_column("shares", justify="right")
    table.add_column("measured", justify="right")
    for prediction in ("predicted", "at the measured pace", "from the learning epoch"):
        table.add_column(prediction, justify="right")
        table.add_column("error", justify="right")
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
    console.print(f"predicted: {_errors([row.predicted_s / row.measured_s for row in rows])}")
    known = [abs(1 / row.pace_ratio - 1) for row in rows]
    console.print(f"known shares meanwhile: median error {statistics.median(known):.1%}, largest {max(known):.1%}")
    at_pace = [row.predicted_s * row.pace_ratio / row.measured_s for row in rows]
    console.print(f"relative to the alternating known shares: {_errors(at_pace)}")
    console.print(f"from the learning epoch alone: {_errors([row.early_s / row.measured_s for row in rows])}")
    off = [math.log(row.predicted_s / row.measured_s) for row in rows]
    ratios = [abs(math.expm1(one - other)) for one, other in zip(off[::2], off[1::2], strict=True)]
    console.print(
        f"predicted ratio of two alternating vectors: median error {statistics.median(ratios):.1%}, "
        f"largest {max(ratios):.1%}"
    )
    beyond = sum(abs(row.predicted_s - row.measured_s) > 2 * row.error_s for row in rows)
    standard_error = statistics.median(row.error_s / row.measured_s for row in rows)
    console.print(
        f"the measurement itself: median standard error {standard_error:.1%}; {beyond} of {len(rows)} predictions are "
        f"off by more than two standard errors; load {os.getloadavg()[1]:.1f} on {os.cpu_count()} processors"
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "prediction.txt").write_text(console.export_text())


def _errors(ratios: Sequence[float]) -> str:
    """Return a summary of the errors, with and without their common factor, which is the machine's drift."""
    errors = [abs(ratio - 1) for ratio in ratios]
    common = math.exp(statistics.median(map(math.log, ratios)))
    rest = statistics.median(abs(ratio / common - 1) for ratio in ratios)
    return (
        f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}; "
        f"{common - 1:+.1%} of it is common to all, and without it the median error is {rest:.1%}"
    )
