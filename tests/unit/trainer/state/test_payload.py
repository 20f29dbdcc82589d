"""Payloads of a transfer of state."""

from __future__ import annotations

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.state import transfer
from heterotrain.state.ranges import TensorRange
from heterotrain.state.tensors import flatten


def test_a_rank_that_lacks_what_another_one_has_says_so_and_ends_no_payload_early() -> None:
    """The header has promised a length: bytes of the next message would stand for the rest."""
    leader = flatten({"seen": torch.arange(4.0), "longer": torch.arange(6.0)})
    own = flatten({"seen": torch.arange(4.0), "longer": torch.arange(2.0)})
    ranges = [TensorRange(name, 0, 4 * held.own.elements) for name, held in leader.by_name.items()]
    assert len(ranges) == 2
    payload = transfer._payload((own.by_name,), ranges)
    assert payload.size_bytes == 40
    with pytest.raises(UsageError, match="register the same objects on every rank"):
        list(payload.views)
