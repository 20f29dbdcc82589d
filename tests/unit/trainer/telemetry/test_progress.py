"""The leader's progress: a line every ten seconds in a log, a bar on a terminal."""

from __future__ import annotations

import io
import logging
from dataclasses import replace

import pytest
from heterotrain.telemetry.progress import CLEAR, Position, ProgressDisplay, bar, line

HALF = Position(
    epoch=3, epochs=8, samples=4000, epoch_done=500, epoch_samples=1000, loss=0.3125, ranks=5, share_samples=40,
    batch_samples=60,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("position", "rate", "expected"),
    [
        (HALF, 100.0, "epoch 4 of 8 (44 %), loss 0.3125, 100 samples/s, 5 ranks, share 40 of 60, 45 s left"),
        (HALF, 12_345.6, "epoch 4 of 8 (44 %), loss 0.3125, 12,346 samples/s, 5 ranks, share 40 of 60, 0 s left"),
        (
            replace(HALF, price_per_hour=6.64),
            10.0,
            (
                "epoch 4 of 8 (44 %), loss 0.3125, 10 samples/s, 5 ranks, share 40 of 60, 7 min 30 s left, "
                "price 6.64 an hour, 0.83 until the end"
            ),
        ),
        (
            replace(HALF, ranks=1, loss=None, price_per_hour=1234.5),
            None,
            "epoch 4 of 8 (44 %), price 1,234.50 an hour",
        ),
        (
            replace(HALF, ranks=1, loss=None, price_per_hour=0.04),
            100.0,
            "epoch 4 of 8 (44 %), 100 samples/s, 45 s left, price 0.04 an hour, 0.0005 until the end",
        ),
        (HALF, None, "epoch 4 of 8 (44 %), loss 0.3125, 5 ranks, share 40 of 60"),
        (replace(HALF, ranks=1, loss=None), 1.0, "epoch 4 of 8 (44 %), 1 samples/s, 1 h 15 min left"),
        (replace(HALF, ranks=1, epoch_samples=None), 50.0, "epoch 4 of 8, loss 0.3125, 50 samples/s"),
        (
            replace(HALF, epoch=8, epoch_done=0, ranks=1),
            50.0,
            "epoch 8 of 8 (100 %), loss 0.3125, 50 samples/s, 0 s left",
        ),
    ],
)
def test_line(position: Position, rate: float | None, expected: str) -> None:
    assert line(position, samples_per_s=rate) == expected


def test_bar() -> None:
    assert bar(HALF, samples_per_s=None).startswith("[##########..............] epoch 4 of 8")


def test_the_log_gets_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    display = ProgressDisplay(stream=io.StringIO())
    for second in range(26):
        display.committed(lambda now=second: replace(HALF, samples=100 * now), leads=True, now_s=50.0 + second)  # type: ignore[misc]  # a default argument binds the variable
    assert [record.getMessage().split(", ")[2] for record in caplog.records] == ["100 samples/s"] * 2


def test_other_ranks_stay_silent_and_a_new_leader_counts_its_own_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    display = ProgressDisplay(stream=io.StringIO())
    for second in range(31):
        display.committed(lambda now=second: replace(HALF, samples=100 * now), leads=second > 29, now_s=float(second))  # type: ignore[misc]  # a default argument binds the variable
    assert [record.getMessage().split(", ")[2] for record in caplog.records] == ["100 samples/s"]


def test_a_restored_checkpoint_lies_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    display = ProgressDisplay(stream=io.StringIO())
    display.committed(lambda: HALF, leads=True, now_s=0.0)
    display.committed(lambda: replace(HALF, samples=100), leads=True, now_s=20.0)
    assert "samples/s" not in caplog.records[0].getMessage()


def test_a_terminal_has_a_bar_that_other_lines_replace() -> None:
    stream = Terminal()
    display = ProgressDisplay(stream=stream)
    display.clear()
    display.committed(lambda: HALF, leads=True, now_s=0.0)
    display.committed(lambda: replace(HALF, samples=4100), leads=True, now_s=1.0)
    assert stream.getvalue() == CLEAR + bar(HALF, samples_per_s=100.0)
    display.clear()
    display.clear()
    assert stream.getvalue().endswith(f"45 s left{CLEAR}")
