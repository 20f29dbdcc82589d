"""Counters that alerts watch exist from the start: Prometheus sees no increase in a series that begins with 1."""

from __future__ import annotations

import re
from pathlib import Path

import heterotrain_operator
import pytest
from heterotrain_operator.engine.metrics import FAULT_PARTS, RECONCILE_RESULTS, OperatorMetrics
from heterotrain_operator.engine.queue import Priority

ROOT = Path(heterotrain_operator.__file__).parent


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("heterotrain_operator_reconcile_total", "result", RECONCILE_RESULTS),
        ("heterotrain_operator_internal_errors_total", "part", FAULT_PARTS),
        ("heterotrain_operator_allocations_total", "result", ("ok", "bug")),
        ("heterotrain_operator_queue_duration_seconds_count", "priority", tuple(Priority)),
        ("heterotrain_operator_telemetry_reads_total", "result", ("ok", "Unavailable", "InvalidAnswer")),
    ],
)
def test_counters_start_at_zero(name: str, label: str, values: tuple[str, ...]) -> None:
    registry = OperatorMetrics().registry
    assert {value: registry.get_sample_value(name, {label: value}) for value in values} == dict.fromkeys(values, 0.0)


def test_waits_of_minutes_have_buckets() -> None:
    """A thousand jobs waited for 250 s on average in a measurement."""
    metrics = OperatorMetrics()
    metrics.note_queued(Priority.CHANGED, 250.0)
    labels = {"priority": "changed", "le": "300.0"}
    assert metrics.registry.get_sample_value("heterotrain_operator_queue_duration_seconds_bucket", labels) == 1.0


def test_every_part_and_result_in_the_sources_is_known() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    guarded = {part for text in sources.values() for part in re.findall(r'guard\(\s*"([^"]+)"', text)}
    named = {part for text in sources.values() for part in re.findall(r'part="([^"]+)"', text)}
    assert guarded | named == set(FAULT_PARTS)
    handle = sources[ROOT / "engine/reconcile.py"].split("async def handle")[1].split("async def ")[0]
    assert set(re.findall(r'"(\w+)"', "".join(re.findall(r"return .*", handle)))) == set(RECONCILE_RESULTS)
