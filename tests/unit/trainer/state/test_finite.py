"""Whether tensors are finite."""

from __future__ import annotations

import math

import pytest
import torch
from heterotrain.state.finite import all_finite, first_non_finite, is_finite, largest
from hypothesis import given
from hypothesis import strategies as st


@given(
    values=st.lists(st.floats(width=32) | st.just(math.nan), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_agrees_with_torch(values: list[float], dtype: torch.dtype) -> None:
    """The screening by a sum has neither false alarms nor misses."""
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert all_finite([torch.ones(3), tensor]) == is_finite(tensor) == bool(tensor.isfinite().all())


def test_a_sum_that_overflows_is_no_alarm() -> None:
    """Each element is finite although float32 cannot hold their sum; infinities of both signs are found."""
    assert all_finite([torch.full((10,), 3e38)])
    assert not all_finite([torch.tensor([math.inf, -math.inf])])
    assert all_finite([])
    assert all_finite([torch.empty(0), torch.tensor([1, 2])])


def test_the_largest_magnitude_shows_what_is_not_finite() -> None:
    """NaN and infinities survive; an empty tensor has magnitude 0."""
    assert largest(torch.tensor([1.0, -7.0])) == 7.0
    assert math.isnan(largest(torch.tensor([1.0, math.nan])))
    assert largest(torch.tensor([1.0, -math.inf])) == math.inf
    assert largest(torch.empty(0)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_trained_parameter_is_named(value: float) -> None:
    """A frozen one is not looked at, nor is a buffer: masks of infinities are constants that a script wants."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model.register_buffer("mask", torch.tensor([-math.inf]))
    with torch.no_grad():
        model[0].weight[0, 0] = value
        model[1].bias[1] = value
    assert first_non_finite(model.named_parameters()) == "0.weight"
    model[0].requires_grad_(False)
    assert first_non_finite(model.named_parameters()) == "1.bias"
    model[1].requires_grad_(False)
    assert first_non_finite(model.named_parameters()) is None


def test_a_sum_that_overflowed_is_looked_into() -> None:
    bad, huge = torch.tensor([1.0, math.nan]), torch.full((10,), 3e38)
    assert not all_finite([torch.ones(2), bad])
    assert all_finite([torch.ones(2), huge])
