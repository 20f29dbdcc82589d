"""A failing TensorBoard folder never disturbs the training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.telemetry import tensorboard
from heterotrain.telemetry.report import RankMetrics
from heterotrain.telemetry.tensorboard import EventFile, TensorBoardWriter


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Later points are dropped at once, and closing returns."""
    (tmp_path / "file").touch()
    writer = EventFile(tmp_path / "file" / "below", suffix=".w", first_step=1)
    writer.put(1, {"a": 1.0})
    writer.close()
    writer.put(2, {"a": 1.0})
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "no more TensorBoard points are written"
    ]
    assert "Not a directory" in caplog.text


def test_a_disk_that_is_too_slow_never_holds_up_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of waiting points is bounded, and more are left out; the end does not wait for a disk that hangs."""
    monkeypatch.setattr(tensorboard, "PENDING", 2)
    monkeypatch.setattr(tensorboard, "CLOSE_S", 0.01)
    hangs = threading.Event()
    monkeypatch.setattr(EventFile, "_run", lambda *_: hangs.wait())
    writer = EventFile(tmp_path, suffix=".w", first_step=1)
    for step in range(5):
        writer.put(step)
    writer.close()
    assert writer._points.qsize() == 2
    hangs.set()


def test_a_url_is_refused_as_a_folder() -> None:
    """An object store is not a folder."""
    identity = Identity(mode=Mode.ALONE)
    with pytest.raises(UsageError, match="'s3://bucket/runs' is not a path"):
        TensorBoardWriter("s3://bucket/runs", identity, report=RankMetrics(identity))
