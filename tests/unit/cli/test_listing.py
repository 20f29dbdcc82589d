"""Rows of `heterotrain get`, which are read without the models, against the same values read by the models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from heterotrain_cli.cluster.listing import row_of
from heterotrain_cli.cluster.view import view_of

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
RUNNING = {
    "state": "Running", "ready": "2/3", "progress": "41%", "samplesPerSecond": 1234.5, "efficiency": 0.9,
    "estimatedRemainingSeconds": 700, "pricePerHour": "3.50",
}  # fmt: skip


@pytest.mark.parametrize(
    "status",
    [
        None, {}, RUNNING, RUNNING | {"state": "Succeeded"}, {"state": "Failed", "samplesPerSecond": 0},
        dict.fromkeys(RUNNING), {name: {"of": "another version"} for name in RUNNING},
        {name: ["x"] for name in RUNNING} | {"efficiency": 1},
    ],
)  # fmt: skip
def test_a_row_has_what_the_models_read(status: dict[str, Any] | None) -> None:
    created = "2026-11-22T10:00:00Z"
    body = {"metadata": {"name": "j", "namespace": "ml", "creationTimestamp": created}, "status": status}
    row, view = row_of(body, NOW), view_of(body, NOW)
    read = view.status
    assert (row.namespace, row.name, row.age_s) == (view.namespace, view.name, 7200)
    assert (row.state, row.ready, row.progress or None) == (read.state, read.ready, read.progress)
    assert (row.samples_per_second, row.efficiency) == (read.samples_per_second, read.efficiency)
    assert (row.price_per_hour or None) == read.price_per_hour
    assert row.remaining_s == (None if view.has_ended else read.estimated_remaining_seconds)
