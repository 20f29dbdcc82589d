"""Which ranks' copies of the state differ."""

from __future__ import annotations

import math

import pytest
import torch
from heterotrain.state.cause import Account, formats_of, likely_cause
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


PLAIN = Account(-1, {"exp_avg": "torch.float32"})


@pytest.mark.parametrize(
    ("accounts", "others", "names", "said"),
    [
        ([PLAIN, PLAIN, Account(7, {"exp_avg": "torch.float64"})], (2,), ["w"],
         "its exp_avg is torch.float64 on rank 2 and torch.float32 on rank 0"),
        ([PLAIN, Account(-1, {})], (1,), ["w"], "its exp_avg is not there on rank 1"),
        ([PLAIN, PLAIN], (1,), ["teacher"], "code changes frozen parameters by values of its own rank"),
        ([PLAIN, PLAIN, Account(7, PLAIN.formats)], (2,), ["w"], "rank 2, which took the state over after step 6"),
        ([PLAIN, Account(7, PLAIN.formats), Account(7, PLAIN.formats)], (0,), ["w"], "missing on rank 1, 2, which"),
        ([PLAIN, Account(7, PLAIN.formats), Account(9, PLAIN.formats)], (2,), ["w"], "missing on rank 2, which"),
        ([PLAIN, PLAIN, Account(7, PLAIN.formats)], (1,), ["w"], ""),
        ([PLAIN, PLAIN], (1,), ["w", "teacher"], ""),
    ],
)  # fmt: skip
def test_what_ranks_say_about_their_copies_points_to_the_cause(
    accounts: list[Account], others: tuple[int, ...], names: list[str], said: str
) -> None:
    found = likely_cause(Difference(0, others), accounts, names=names, frozen=["teacher"])
    assert said in found
    assert bool(found) == bool(said)


def test_formats_are_those_of_all_values_by_name() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg"] = optimizer.state[model.bias]["exp_avg"].double()
    optimizer.state[model.bias]["note"] = 1
    assert formats_of([optimizer]) == {
        "step": "torch.float32", "exp_avg": "torch.float32 and torch.float64", "exp_avg_sq": "torch.float32",
        "note": "int",
    }  # fmt: skip
