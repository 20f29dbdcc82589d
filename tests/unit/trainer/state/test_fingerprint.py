"""Fingerprints of a training state."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from heterotrain.state import fingerprint
from heterotrain.state.fingerprint import (
    Item,
    checksum,
    combined,
    items_of,
    named,
    parts_in,
    projection,
    settings_checksum,
    slices_of,
    to_float,
    tolerance,
)
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.complex128)


def items(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Item]:
    """Return random tensors."""
    generator = torch.Generator().manual_seed(5)
    return [
        Item(str(number), "weights", torch.randn(shape, generator=generator).to(dtype))
        for number, shape in enumerate(shapes)
    ]


def whole(found: list[Item]) -> float:
    """Return the checksum of a state in one slice."""
    return to_float(checksum(found)[0])


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_each_changed_bit_changes_the_checksum(data: st.DataObject, dtype: torch.dtype) -> None:
    """Wherever it is, also in the last bytes that fill no word."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    found = items(*[(size,) for size in sizes], dtype=dtype)
    before = whole(found)
    tensor = data.draw(st.sampled_from(found)).tensor.view(torch.uint8)
    tensor[data.draw(st.integers(0, tensor.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert whole(found) != before


def test_swapped_values_change_the_checksum() -> None:
    """A plain sum would not notice two values, two signs or two tensors that changed places."""
    found = items((64,), (64,))
    before = whole(found)
    first, second = (item.tensor for item in found)
    for one, other in ((first[:8], first[8:16]), (first, second)):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
        assert whole(found) != before
        other.copy_(one)
        one.copy_(kept)
    assert whole(found) == before


def test_a_checksum_fits_a_float() -> None:
    """52 bits, exact in the control vector; it covers the settings; large states take several blocks."""
    found = items((300_000,), (3, 5))
    value = whole(found)
    assert value == int(value) < 2**52
    assert struct.unpack("d", struct.pack("d", value)) == (value,)
    assert to_float(12345, 1) != to_float(12345, 2)
    before = whole(found)
    found[0].tensor[299_999] += 1
    assert whole(found) != before
    assert combined([1.0, 2.0]) != combined([2.0, 1.0])


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    least=st.integers(8, 500),
)
def test_slices_cover_each_byte_once(sizes: list[int], dtype: torch.dtype, least: int) -> None:
    """Between words of a tensor, so that no element is cut; none is shorter than allowed, up to a word."""
    found = items(*[(size,) for size in sizes], dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "SLICE_BYTES", least)
        slices = [parts_in(found, start, stop) for start, stop in slices_of(found)]
    for item in found:
        own = [part.tensor for each in slices for part in each if part.name == item.name]
        assert torch.cat([item.tensor[:0], *own]).equal(item.tensor)
    for each in slices[:-1]:
        assert sum(part.tensor.nbytes for part in each) >= least - 16


def test_slices_grow_with_the_state() -> None:
    """A pass takes a bounded number of checks up to a state of 16 GiB."""
    huge = [Item("a", "weights", torch.empty(1 << 30, dtype=torch.uint8, device="meta"))]
    assert len(slices_of(huge)) == fingerprint.SLICES
    small = [Item("a", "weights", torch.empty(100))]
    assert len(slices_of(small)) == 1


def test_items_are_weights_moments_and_given_buffers() -> None:
    """Each parameter is followed by what the optimizers keep for it; numbers are left to the settings."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = items_of(model, [optimizer], [("mean", torch.zeros(3))])
    assert [item.name for item in found] == [
        "weight", "exp_avg of weight", "exp_avg_sq of weight", "step of weight",
        "bias", "exp_avg of bias", "exp_avg_sq of bias", "step of bias", "mean",
    ]  # fmt: skip
    assert found[0].tensor.data_ptr() == model.weight.data_ptr()
    before = settings_checksum([optimizer])
    assert settings_checksum([torch.optim.AdamW(model.parameters(), lr=0.1)]) == before
    optimizer.param_groups[0]["lr"] = 0.05
    assert settings_checksum([optimizer]) != before


def test_what_differs_is_named() -> None:
    """By the checksums of a slice's tensors."""
    found = items((7,), (5, 5), (9,))
    before = dict(named(found))
    found[1].tensor[4, 4] += 1e-6
    after = dict(named(found))
    assert [name for name in before if before[name] != after[name]] == ["1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_is_tolerated_and_more_is_not(dtype: torch.dtype) -> None:
    """The difference of projections is about the relative difference over the tolerance, whatever the values' size."""
    for scale in (1e-20, 1.0, 1e15):
        found = items((50, 50), (2500,), dtype=torch.float64)
        found = [Item(item.name, item.role, (item.tensor * scale).to(dtype)) for item in found]
        before = projection(found)
        generator = torch.Generator().manual_seed(3)

        def moved(relative: float, kept: list[Item] = found, noise: torch.Generator = generator) -> list[Item]:
            factors = [1 + relative * torch.randn(i.tensor.shape, generator=noise, dtype=torch.float64) for i in kept]
            return [
                Item(item.name, item.role, (item.tensor.double() * factor).to(dtype))
                for item, factor in zip(kept, factors, strict=True)
            ]

        assert abs(projection(moved(tolerance(dtype) / 16)) - before) < 1.0
        far = [abs(projection(moved(30 * tolerance(dtype))) - before) for _ in range(20)]
        assert sum(value > 1.0 for value in far) > 15


def test_a_projection_of_values_that_are_not_finite_is_infinite() -> None:
    """Without a crash; zeros and whole numbers contribute nothing."""
    found = items((10,))
    found[0].tensor[3] = math.nan
    assert projection(found) == math.inf
    assert projection([Item("z", "weights", torch.zeros(10))]) == 0.0
    assert projection([Item("z", "step", torch.ones(10, dtype=torch.int32))]) == 0.0
