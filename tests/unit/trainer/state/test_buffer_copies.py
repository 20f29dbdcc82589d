"""Copies of buffers: equal to the buffers when they are made, and made only when needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heterotrain.state.buffer_copies import SMALL_BYTES, BufferCopies

LARGE = SMALL_BYTES  # elements of fp32, so four times as many bytes


def test_an_unchanged_large_buffer_is_not_copied_again() -> None:
    """Marks in the copies show which ones were written over."""
    buffers = {"mask": torch.ones(LARGE), "small": torch.ones(3)}
    copies = BufferCopies()
    copies.renew(buffers.items())
    for copy in copies.values.values():
        copy[1] = 7.0  # not an element that is looked at
    copies.renew(buffers.items())
    assert {name: float(copy[1]) for name, copy in copies.values.items()} == {"mask": 7.0, "small": 1.0}


def through_data(buffer: torch.Tensor) -> None:
    """Change it as torch does not count."""
    buffer.data.mul_(0.5)


@pytest.mark.parametrize("change", [lambda b: b.add_(1.0), lambda b: b[5:6].zero_(), through_data])
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("inference", [False, True])
def test_a_changed_buffer_is_restored(change: Callable[[torch.Tensor], object], size: int, inference: bool) -> None:
    """Whatever changed it, in the step before or in the failed attempt."""
    with torch.inference_mode(inference):
        buffer = torch.arange(float(size))
    copies = BufferCopies()
    for _ in range(3):
        copies.renew([("b", buffer)])
        wanted = buffer.clone()
        with torch.inference_mode(inference):
            change(buffer)
            copies.restore([("b", buffer)])
        assert torch.equal(buffer, wanted)
        with torch.inference_mode(inference):
            change(buffer)


def test_replaced_and_new_buffers() -> None:
    """A model may assign a new tensor in each step; a new or larger buffer keeps its values."""
    copies = BufferCopies()
    copies.renew([("b", torch.zeros(2))])
    copies.restore([("b", assigned := torch.ones(2))])
    assert torch.equal(assigned, torch.zeros(2))
    new = torch.ones(5)
    copies.restore([("b", new), ("c", new)])
    assert torch.equal(new, torch.ones(5))
    copies.renew([("b", new)])
    assert torch.equal(copies.values["b"], new)
