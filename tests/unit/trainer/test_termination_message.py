"""What an uncaught error is called in the outcome, so that the operator can say what to do."""

from __future__ import annotations

import pytest
from heterotrain.errors import Diverged, NonFinite, PeerLost, StateLost, UsageError
from heterotrain.termination_message import cause_of
from heterotrain_core.contract.outcome import Cause, Ending, Outcome, decode_outcome, encode_outcome


class OutOfMemoryError(RuntimeError):
    """Has the name of PyTorch's error."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (NonFinite("loss"), Cause.NOT_FINITE),
        (Diverged("copies"), Cause.COPIES_DIFFERED),
        (StateLost("parts"), Cause.STATE_LOST),
        (OutOfMemoryError("CUDA out of memory"), Cause.OUT_OF_DEVICE_MEMORY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: no"), Cause.OUT_OF_DEVICE_MEMORY),
        (RuntimeError("CUDA error: out of memory"), Cause.OUT_OF_DEVICE_MEMORY),
        (RuntimeError("something else"), None),
        (UsageError("no"), None),
        (PeerLost("gone"), None),
        (KeyError("x"), None),
    ],
)
def test_causes_of_errors(error: Exception, cause: Cause | None) -> None:
    assert cause_of(error) is cause
    written = encode_outcome(Outcome(ending=Ending.FAILED, reason="r", epoch=0, step=0, cause=cause))
    found = decode_outcome(written)
    assert found is not None
    assert found.cause is cause


@pytest.mark.parametrize("cause", ['"Unknown in this version"', "7", "null", "[]"])
def test_a_cause_of_another_version_is_none(cause: str) -> None:
    found = decode_outcome(f'{{"ending": "failed", "reason": "r", "epoch": 0, "step": 0, "cause": {cause}}}')
    assert found is not None
    assert found.cause is None
