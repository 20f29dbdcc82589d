"""The gate between sums and update, with tensors on the CPU in place of a device's."""

from __future__ import annotations

import math

import pytest
import torch
from heterotrain.exchange.gate import Gate, runs_behind
from heterotrain.network.abort_flag import AbortFlag


@pytest.mark.parametrize("is_up", [None, False, True])
@pytest.mark.parametrize("value", [2.0, 0.0, math.inf, -math.inf, math.nan, 1e30])
def test_a_gate_is_closed_by_the_flag_and_by_what_is_not_finite(value: float, is_up: bool | None) -> None:
    """Exactly 0.0 or 1.0: other numbers do not stop fused kernels, and change their counts of steps."""
    flag = None if is_up is None else AbortFlag()
    if flag is not None and is_up:
        flag.lift()
    flats = [torch.ones(3), torch.tensor([1.0, value])]
    gate = Gate(flats, flag)
    squared = 4.0 + float(torch.tensor(value).square())
    is_open = math.isfinite(squared) and not is_up
    assert gate.closed.dtype is torch.float32  # what the kernels take
    assert float(gate.closed) == (0.0 if is_open else 1.0)
    passed = gate.read()
    assert passed.was_open is is_open
    assert passed.squared == pytest.approx(squared, nan_ok=True)


def test_the_norm_of_half_formats_is_taken_in_more_bits() -> None:
    """In fp16, it would overflow from 65,504 on; formats may differ by bucket."""
    flats = [torch.full((4,), 60_000.0, dtype=torch.float16), torch.full((4,), 3.0, dtype=torch.float64)]
    assert Gate(flats, None).read().squared == pytest.approx(4 * 60_000.0**2 + 36.0, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip_norm", [0.5, 50.0])
def test_clipping_reads_nothing(dtype: torch.dtype, clip_norm: float) -> None:
    """Kernels divide gradients by a number in float32; those in float64 are multiplied."""
    flats = [torch.full((9,), 2.0, dtype=dtype), torch.full((16,), 2.0, dtype=dtype)]
    gate = Gate(flats, None)
    gate.clip(clip_norm)
    divisor = gate.divisor
    wanted = min(1.0, clip_norm / 10.0)
    if dtype is torch.float64:
        assert divisor is None
        assert float(flats[1][0]) == pytest.approx(2.0 * wanted, rel=1e-15)
    else:
        assert divisor is not None
        assert 1.0 / float(divisor) == pytest.approx(wanted, rel=1e-6)
        assert float(flats[1][0]) == 2.0


def test_a_closed_gate_leaves_the_gradient_for_the_host_to_look_at() -> None:
    """Clipping by an infinite norm would make zeros of it."""
    flats = [torch.tensor([1.0, math.inf], dtype=torch.float64)]
    Gate(flats, None).clip(1.0)
    assert flats[0].tolist() == [1.0, math.inf]


def test_a_cpu_has_its_sums_when_the_host_goes_on() -> None:
    """So nothing is gained by a gate."""
    assert not runs_behind([torch.ones(2)])
