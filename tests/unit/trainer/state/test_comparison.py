"""Which ranks' copies of the state differ."""

from __future__ import annotations

import math

import pytest
from heterotrain.state.comparison import Difference, compare, describe
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("fingerprints", "tolerance", "expected"),
    [
        ((5.0, 5.0, 5.0), 0.0, None),
        ((5.0,), 0.0, None),
        ((5.0, 7.0), 0.0, Difference(0, (1,))),
        ((7.0, 5.0, 5.0), 0.0, Difference(1, (0,))),
        ((5.0, 7.0, 5.0, 9.0), 0.0, Difference(0, (1, 3))),
        ((5.0, math.nan), 0.0, None),
        ((math.nan, math.nan), 0.0, None),
        ((0.0, 0.9, -0.9), 1.0, None),
        ((0.0, 0.5, 40.0), 1.0, Difference(0, (2,))),
        ((math.inf, 0.5, 0.4), 1.0, Difference(1, (0,))),
        ((math.inf, math.inf), 1.0, None),
    ],
)
def test_copies(fingerprints: tuple[float, ...], tolerance: float, expected: Difference | None) -> None:
    """The most common copy is the donor's; without all fingerprints there is no conclusion."""
    assert compare(fingerprints, tolerance=tolerance) == expected


@given(st.lists(st.integers(0, 3).map(float), min_size=1, max_size=9))
def test_checksums_name_all_but_a_largest_group(fingerprints: list[float]) -> None:
    """The donor's group is as large as any other."""
    found = compare(fingerprints, tolerance=0.0)
    if found is None:
        assert len(set(fingerprints)) == 1
        return
    agreeing = [rank for rank in range(len(fingerprints)) if rank not in found.others]
    assert {fingerprints[rank] for rank in agreeing} == {fingerprints[found.donor]}
    assert len(agreeing) == max(map(fingerprints.count, fingerprints))
    assert found.donor == agreeing[0]


def test_the_sentence_names_ranks_workers_and_tensors() -> None:
    """A few of each: the message has a limit."""
    text = describe(Difference(0, (1,)), step=12, workers=["w0", "w1", "w2"], names=["a", "b", "c", "d", "e"])
    assert text == (
        "the training state differs between ranks after step 12: rank 1 (w1) against rank 0 (w0), whose copy "
        "2 of 3 ranks have, in a, b, c and 2 more"
    )
    two = describe(Difference(0, (1,)), step=12, workers=["w0", "w1"], names=["a"])
    assert two.endswith("against rank 0 (w0), and no copy is more common, in a")
    many = describe(Difference(0, tuple(range(1, 40))), step=1, workers=[f"w{i}" for i in range(40)], names=["a"])
    assert "rank 8 (w8) and 31 more against rank 0" in many
