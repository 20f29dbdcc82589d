"""A failing TensorBoard folder never disturbs the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.telemetry import tensorboard
from heterotrain.telemetry.report import Report
from heterotrain.telemetry.tensorboard import Point, TensorBoardWriter, WriterThread


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Later points are dropped at once, and closing returns."""
    (tmp_path / "file").touch()
    writer = WriterThread(tmp_path / "file" / "below", suffix=".w", first_step=1)
    writer.put(Point(step=1, scalars={"a": 1.0}))
    writer.close()
    writer.put(Point(step=2, scalars={"a": 1.0}))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "no more TensorBoard points are written"
    ]
    assert "Not a directory" in caplog.text


def test_a_disk_that_is_too_slow_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of waiting points is bounded."""
    monkeypatch.setattr(tensorboard, "PENDING", 0)
    writer = WriterThread(tmp_path, suffix=".w", first_step=1)
    for step in range(3):
        writer.put(Point(step=step))
    writer.close()
    assert len(caplog.records) == 1
    assert "too slow" in caplog.text


def test_a_url_is_refused_as_a_folder() -> None:
    """An object store is not a folder."""
    identity = Identity(mode=Mode.ALONE)
    with pytest.raises(UsageError, match="'s3://bucket/runs' is not a path"):
        TensorBoardWriter("s3://bucket/runs", identity, report=Report(identity))
