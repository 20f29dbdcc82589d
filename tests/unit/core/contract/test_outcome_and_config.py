"""Termination messages fit and survive; the fixed configuration is strict."""

from __future__ import annotations

import math

import pytest
from heterotrain_core.contract.config import TrainingConfig, decode_config, encode_config
from heterotrain_core.contract.outcome import (
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
    if len(metrics) <= MAX_METRICS and all(math.isfinite(v) and len(n) <= 64 for n, v in metrics.items()):
        assert metrics == read.metrics


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
