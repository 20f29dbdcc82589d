"""Termination messages fit and survive; the fixed configuration is strict."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.config import TrainingConfig, decode_config, encode_config
from heterotrain_core.contract.outcome import MAX_MESSAGE_BYTES, Ending, Outcome, decode_outcome, encode_outcome
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


@pytest.mark.parametrize("text", ["", "Segmentation fault", "[]", '{"ending": "vanished"}', '{"ending": "finished"}'])
def test_a_foreign_message_is_no_outcome(text: str) -> None:
    """A user's own last words are not mistaken for ours."""
    assert decode_outcome(text) is None


def test_the_configuration_survives_and_is_strict() -> None:
    """Another version's field is an error, not a silent default."""
    config = TrainingConfig(epochs=3, checkpoint_uri="file:///c")
    assert config == decode_config(encode_config(config))
    with pytest.raises(ValueError, match="epochz"):
        decode_config('{"epochz": 3}')
