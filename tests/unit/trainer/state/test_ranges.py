"""Pieces are the common refinement of all holdings; checked element by element."""

from itertools import pairwise

import pytest
from heterotrain.state.ranges import OwnedRange, TensorRange, between, missing, pieces_of, whole
from hypothesis import given
from hypothesis import strategies as st

SIZES = {"a": 7, "b": 1, "c": 12}


@st.composite
def holdings(draw: st.DrawFn) -> list[dict[str, TensorRange]]:
    ranks = draw(st.integers(0, 5))
    found = []
    for _ in range(ranks):
        holding = {}
        for name, size in SIZES.items():
            if draw(st.booleans()):
                start = draw(st.integers(0, size))
                holding[name] = TensorRange(name, start, draw(st.integers(start, size)))
        found.append(holding)
    return found


def owners_of(name: str, element: int, held: list[dict[str, TensorRange]]) -> tuple[int, ...]:
    return tuple(
        rank
        for rank, holding in enumerate(held)
        if name in holding and holding[name].start <= element < holding[name].stop
    )


@given(holdings())
def test_every_held_element_is_in_one_piece_with_exactly_its_holders(held: list[dict[str, TensorRange]]) -> None:
    found = pieces_of(SIZES, held)
    seen = {(piece.name, element): piece.owners for piece in found for element in range(piece.start, piece.stop)}
    expected = {
        (name, element): owners_of(name, element, held) for name, size in SIZES.items() for element in range(size)
    }
    assert seen == {place: owners for place, owners in expected.items() if owners}
    assert sum(piece.elements for piece in found) == len(seen)


@given(holdings())
def test_pieces_are_in_order_and_neighbours_differ_in_their_owners(held: list[dict[str, TensorRange]]) -> None:
    found = pieces_of(SIZES, held)
    names = list(SIZES)
    assert [(names.index(p.name), p.start) for p in found] == sorted((names.index(p.name), p.start) for p in found)
    for one, other in pairwise(found):
        assert one.name != other.name or one.stop < other.start or one.owners != other.owners


@given(holdings())
def test_what_is_missing_is_what_nobody_holds(held: list[dict[str, TensorRange]]) -> None:
    found = missing(SIZES, held)
    gone = {(name, e) for name, gaps in found.items() for gap in gaps for e in range(gap.start, gap.stop)}
    assert gone == {(n, e) for n, size in SIZES.items() for e in range(size) if not owners_of(n, e, held)}


def test_ranks_that_hold_everything_share_one_piece_per_parameter() -> None:
    assert pieces_of(SIZES, [whole(SIZES)] * 2) == tuple(OwnedRange(n, 0, size, (0, 1)) for n, size in SIZES.items())
    assert missing(SIZES, [whole(SIZES)]) == {}


@pytest.mark.parametrize(
    "holding",
    [
        {"z": TensorRange("z", 0, 1)},
        {"a": TensorRange("a", 0, 8)},
        {"a": TensorRange("a", -1, 2)},
        {"a": TensorRange("a", 3, 2)},
    ],
)
def test_a_holding_outside_of_the_model_is_refused(holding: dict[str, TensorRange]) -> None:
    with pytest.raises(ValueError, match="rank 0 holds"):
        pieces_of(SIZES, [holding])


RANGES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda edges: TensorRange("a", min(edges), max(edges)))


@given(RANGES, RANGES)
def test_two_ranges_of_a_tensor_are_sets_of_elements(one: TensorRange, other: TensorRange) -> None:
    first, second = set(range(one.start, one.stop)), set(range(other.start, other.stop))
    common = one.common(other)
    assert (set() if common is None else set(range(common.start, common.stop))) == first & second
    assert [e for rest in one.without(other) for e in range(rest.start, rest.stop)] == sorted(first - second)
    assert one.has(other) or not second <= first or not second


@given(st.lists(RANGES, max_size=5), st.integers(0, 20), st.integers(0, 20))
def test_ranges_in_a_row_are_cut_anywhere(row: list[TensorRange], start: int, stop: int) -> None:
    every = [e for each in row for e in range(each.start, each.stop)]
    assert [e for each in between(row, start, stop) for e in range(each.start, each.stop)] == every[start:stop]
