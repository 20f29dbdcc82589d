"""Samples come back as they were; what could not come back is refused by name, and damaged bytes are an error."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from heterotrain.data.sample_codec import NotEncodableError, decode, encode
from hypothesis import given
from hypothesis import strategies as st

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=4)
    ),
    max_leaves=12,
)


class Pair(NamedTuple):
    x: int
    y: int


@given(st.lists(VALUES, max_size=5))
def test_plain_values_come_back_with_their_types(values: list[Any]) -> None:
    """Lists stay lists, tuples tuples, and keys keep their types."""
    found = decode(encode(values))
    assert repr(found) == repr(values)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Also without elements, transposed, conjugated, and after texts of any length."""
    value = (torch.arange(6.0) / 3).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    values = [b"x", value, {"a": value.T if value.dim() == 2 else value}, value.conj()]
    found = decode(encode(values))
    for before, after in zip((values[1], values[2]["a"], values[3]), (found[1], found[2]["a"], found[3]), strict=True):
        assert after.dtype == dtype
        torch.testing.assert_close(after, before.resolve_conj(), rtol=0, atol=0)
    if value.numel():
        found[1].zero_()  # its memory may be written


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(3), np.arange(6).reshape(2, 3)[:, ::2], np.array("abc"),
                                   np.array(["2026-01-01"], dtype="datetime64[D]"), np.zeros((0, 2))])  # fmt: skip
def test_arrays_come_back(value: Any) -> None:
    """Scalars of numpy stay such."""
    (found,) = decode(encode([value]))
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"), (Pair(1, 2), "Pair"), ({1}, "builtins.set"), (np.array([object()]), "object"),
        (torch.nn.Parameter(torch.zeros(1)), "Parameter"), (torch.zeros(1, requires_grad=True), "part of a graph"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
)  # fmt: skip
def test_other_objects_are_refused_by_name(value: Any, name: str) -> None:
    """The receiver could not get the same object without running code of the sender."""
    with pytest.raises(NotEncodableError, match=name):
        encode([(1, {"a": value})])


def test_values_without_an_end_are_refused() -> None:
    """A list that contains itself has no form as bytes."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotEncodableError, match="too deeply"):
        encode([endless])


@given(st.binary(max_size=200))
def test_bytes_from_elsewhere_are_an_error_or_harmless_values(data: bytes) -> None:
    """Nothing but a ``ValueError`` comes of them."""
    good = encode([{"a": torch.zeros(3), "b": b"1", "c": np.zeros(2)}])
    for attempt in (data, good[: len(data)], good[:20] + data, data[:8] + good[8:]):
        try:
            decode(attempt)
        except ValueError:
            continue
