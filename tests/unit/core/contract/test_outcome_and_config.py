"""Termination messages fit and survive; the fixed configuration is strict."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from heterotrain_core.contract.config import TrainingConfig, decode_config, encode_config
from heterotrain_core.contract.outcome import (
    LATEST_S,
    MAX_COUNT,
    MAX_MESSAGE_BYTES,
    MAX_METRICS,
    Ending,
    Outcome,
    decode_outcome,
    encode_outcome,
)
from hypothesis import given
from hypothesis import strategies as st


@given(st.text(max_size=9000), st.sampled_from(Ending), st.integers(0, 10**6))
def test_an_outcome_fits_a_termination_message(reason: str, ending: Ending, step: int) -> None:
    """However long the reason, the message fits and keeps how and where it ended."""
    text = encode_outcome(Outcome(ending=ending, reason=reason, epoch=1, step=step))
    assert len(text.encode()) <= MAX_MESSAGE_BYTES
    read = decode_outcome(text)
    assert read is not None
    assert (ending, 1, step) == (read.ending, read.epoch, read.step)


@given(st.dictionaries(st.text(max_size=80), st.floats(), max_size=40))
def test_an_outcome_carries_what_was_reported_last(metrics: dict[str, float]) -> None:
    """Finite values under reasonable names survive, at most sixteen; anything else is left out, not broken."""
    sent = Outcome(ending=Ending.FINISHED, reason="done", epoch=3, step=7, metrics=metrics)
    read = decode_outcome(encode_outcome(sent))
    assert read is not None
    assert len(read.metrics) <= MAX_METRICS
    assert all(math.isfinite(value) and metrics[name] == value for name, value in read.metrics.items())
    fit = len(json.dumps(metrics)) < MAX_MESSAGE_BYTES / 2
    if fit and len(metrics) <= MAX_METRICS and all(math.isfinite(v) and len(n) <= 64 for n, v in metrics.items()):
        assert metrics == read.metrics


def test_metrics_whose_names_do_not_fit_are_left_out() -> None:
    """Sixteen names of 64 characters take three times the message in JSON: each character has six bytes."""
    metrics = {chr(0x4E00 + number) * 64: float(number) for number in range(16)}
    text = encode_outcome(Outcome(ending=Ending.FAILED, reason="boom", epoch=1, step=2, metrics=metrics))
    assert len(text.encode()) <= MAX_MESSAGE_BYTES
    found = decode_outcome(text)
    assert found is not None
    assert (found.ending, found.step) == (Ending.FAILED, 2)
    assert 0 < len(found.metrics) < len(metrics)
    assert found.metrics.items() <= metrics.items()


@given(st.text(max_size=9000), st.integers(0, MAX_COUNT), st.floats(0, LATEST_S, exclude_min=True))
def test_an_outcome_carries_the_newest_checkpoint(reason: str, step: int, time_s: float) -> None:
    """However long the reason, step and time of the checkpoint are kept; an outcome without one says so."""
    sent = Outcome(
        ending=Ending.LEFT, reason=reason, epoch=1, step=step, checkpoint_step=step, checkpoint_time_s=time_s
    )
    text = encode_outcome(sent)
    assert len(text.encode()) <= MAX_MESSAGE_BYTES
    read = decode_outcome(text)
    assert read is not None
    assert (read.checkpoint_step, read.checkpoint_time_s) == (step, time_s)
    without = decode_outcome(encode_outcome(Outcome(ending=Ending.LEFT, reason="", epoch=1, step=step)))
    assert without is not None
    assert (without.checkpoint_step, without.checkpoint_time_s) == (None, None)


@pytest.mark.parametrize(
    ("step", "time_s"),
    [
        (None, 10.0), (3, None), (-1, 10.0), (MAX_COUNT + 1, 10.0), (1.5, 10.0), (True, 10.0), ("3", 10.0),
        (3, 0), (3, -1.0), (3, LATEST_S + 1), (3, float("nan")), (3, float("inf")), (3, True), (3, "10"), ([], {}),
    ],
)  # fmt: skip
def test_a_checkpoint_without_a_possible_step_and_time_is_left_out(step: Any, time_s: Any) -> None:
    """The rest of the outcome counts. Outcomes of older workers have neither field."""
    sent: dict[str, Any] = {"ending": "left", "reason": "told", "epoch": 1, "step": 4}
    expected = Outcome(ending=Ending.LEFT, reason="told", epoch=1, step=4)
    assert decode_outcome(json.dumps(sent | {"checkpoint_step": step, "checkpoint_time_s": time_s})) == expected
    assert decode_outcome(json.dumps(sent)) == expected


@pytest.mark.parametrize("text", ["", "Segmentation fault", "[]", '{"ending": "vanished"}', '{"ending": "finished"}'])
def test_a_foreign_message_is_not_an_outcome(text: str) -> None:
    """A user's own last words are not mistaken for ours."""
    assert decode_outcome(text) is None


def test_the_configuration_survives_the_round_trip_and_is_strict() -> None:
    """Another version's field is an error, not a silent default."""
    config = TrainingConfig(epochs=3, checkpoint_uri="file:///c")
    assert config == decode_config(encode_config(config))
    with pytest.raises(ValueError, match="epochz"):
        decode_config('{"epochz": 3}')
