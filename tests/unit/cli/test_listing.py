"""Rows of `heterotrain get`, which are read without the models, against the same values read by the models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from heterotrain_cli.cluster.listing import cells_of
from heterotrain_cli.cluster.values import UNKNOWN, number, short
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
    view = view_of(body, NOW)
    read = view.status
    busy = UNKNOWN if read.efficiency is None else f"{100 * read.efficiency:.0f}%"
    left = UNKNOWN if view.has_ended else short(read.estimated_remaining_seconds)
    assert cells_of(body, NOW) == [
        view.namespace, view.name, read.state, read.ready, read.progress or UNKNOWN, number(read.samples_per_second),
        busy, left, read.price_per_hour or UNKNOWN, "2h",
    ]  # fmt: skip
