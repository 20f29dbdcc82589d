"""The demo's picture ends with the last step, without the misleading rates of the time after it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from heterotrain_core.contract import metrics
from lab.cluster import Cluster
from lab.picture import draw, last_step_s, rows_of
from lab.telemetry import Prometheus

START_S = 1_000_000.0
STEP_S = 0.4
LAST_S = 60.0
GONE_S = {"job-w0": 66.0, "job-w1": 64.0, "job-w2": 61.0, "job-w3": 12.0}
"""The last scrape of each worker, in seconds since the start; the last worker left during the run."""
WINDOW_S = 6.0


def steps(worker: str, at_s: float) -> float | None:
    """Return the counter in a scrape at this time; ``None`` after the worker's last scrape."""
    return min(at_s, LAST_S) // STEP_S if at_s <= GONE_S[worker] else None


class Recorded(Prometheus):
    """The answers of a Prometheus: counters, and their increases over the window by its own rules."""

    def __init__(self) -> None:
        super().__init__(Cluster())
        object.__setattr__(self, "asked", [])

    def series(self, expression: str, *, start_s: float, end_s: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        self.asked.append((expression, end_s))  # type: ignore[attr-defined]  # set above: the class is frozen
        times = [start_s + step_s * number for number in range(int((end_s - start_s) / step_s) + 1)]
        if "rate(" not in expression:
            return [row(worker, [(t, steps(worker, t - start_s)) for t in times]) for worker in GONE_S]
        rates = {worker: [(t, rate(worker, t - start_s)) for t in times] for worker in GONE_S}
        if expression.startswith("1 / (max("):
            best = [max((r for _, r in each if r), default=None) for each in zip(*rates.values(), strict=True)]
            return [row("", [(t, 1 / b if b else None) for t, b in zip(times, best, strict=True)])]
        assert re.match(r"\(sum by", expression)
        return [row(worker, [(t, 100.0 if r else None) for t, r in values]) for worker, values in rates.items()]


def row(worker: str, values: list[tuple[float, float | None]]) -> dict[str, Any]:
    """Return a series in the API's form: values are text, and missing ones are left out."""
    return {"metric": {metrics.LABEL_WORKER: worker}, "values": [(t, str(v)) for t, v in values if v is not None]}


def rate(worker: str, at_s: float) -> float | None:
    """Return the steps per second over the window, from its scrapes; it extends half a scrape beyond them."""
    times = range(max(0, int(at_s - WINDOW_S) + 1), int(at_s) + 1)
    found = [(t, value) for t in times if (value := steps(worker, t)) is not None]
    if len(found) < 2:
        return None
    (first_s, first), (last_s, last) = found[0], found[-1]
    covered_s = min(WINDOW_S, last_s - first_s + 1)
    return (last - first) / (last_s - first_s) * covered_s / WINDOW_S


def test_the_step_time_does_not_rise_when_there_are_no_more_steps(tmp_path: Path) -> None:
    prometheus = Recorded()
    end_s = START_S + 70
    path = tmp_path / "picture.png"
    draw(prometheus, job_uid="u", pools={}, start_s=START_S, end_s=end_s, events=(), path=path)
    (drawn,) = [
        float(value)
        for each in prometheus.series("1 / (max(rate(", start_s=START_S, end_s=asked(prometheus)[-1])
        for at_s, value in each["values"][-1:]
    ]
    assert drawn == pytest.approx(STEP_S, rel=0.1)
    (uncut,) = prometheus.series("1 / (max(rate(", start_s=START_S, end_s=end_s)
    assert max(float(value) for at_s, value in uncut["values"] if at_s > START_S + 30) > 3 * STEP_S
    assert path.stat().st_size > 0


def asked(prometheus: Recorded) -> list[float]:
    """Return the ends of the periods in the queries of rates."""
    return [end_s for expression, end_s in prometheus.asked if "rate(" in expression]  # type: ignore[attr-defined]  # see above


def test_the_end_is_the_last_step_whoever_is_scraped_longest() -> None:
    assert last_step_s(Recorded(), "u", start_s=START_S, end_s=START_S + 70) == START_S + LAST_S
    assert last_step_s(Recorded(), "u", start_s=START_S, end_s=START_S + 30) == START_S + 30


def test_numbers_of_events_that_are_close_are_in_different_rows() -> None:
    assert rows_of([43.0, 53.0, 53.2, 53.4, 65.0], near_s=1.5) == [0, 0, 1, 2, 0]
    assert rows_of([], near_s=1.5) == []
