"""Pieces are the common refinement of all holdings; checked element by element."""

from itertools import pairwise

import pytest
from heterotrain.state.holdings import Extent, Piece, missing, overlap, pieces_of, whole
from hypothesis import given
from hypothesis import strategies as st

SIZES = {"a": 7, "b": 1, "c": 12}


@st.composite
def holdings(draw: st.DrawFn) -> list[dict[str, Extent]]:
    ranks = draw(st.integers(0, 5))
    found = []
    for _ in range(ranks):
        holding = {}
        for name, size in SIZES.items():
            if draw(st.booleans()):
                start = draw(st.integers(0, size))
                holding[name] = Extent(start, draw(st.integers(start, size)))
        found.append(holding)
    return found


def owners_of(name: str, element: int, held: list[dict[str, Extent]]) -> tuple[int, ...]:
    return tuple(
        rank
        for rank, holding in enumerate(held)
        if name in holding and holding[name].start <= element < holding[name].stop
    )


@given(holdings())
def test_every_held_element_is_in_one_piece_with_exactly_its_holders(held: list[dict[str, Extent]]) -> None:
    found = pieces_of(SIZES, held)
    seen = {(piece.name, element): piece.owners for piece in found for element in range(piece.start, piece.stop)}
    expected = {
        (name, element): owners_of(name, element, held) for name, size in SIZES.items() for element in range(size)
    }
    assert seen == {place: owners for place, owners in expected.items() if owners}
    assert sum(piece.extent.elements for piece in found) == len(seen)


@given(holdings())
def test_pieces_are_in_order_and_neighbours_differ_in_their_owners(held: list[dict[str, Extent]]) -> None:
    found = pieces_of(SIZES, held)
    names = list(SIZES)
    assert [(names.index(p.name), p.start) for p in found] == sorted((names.index(p.name), p.start) for p in found)
    for one, other in pairwise(found):
        assert one.name != other.name or one.stop < other.start or one.owners != other.owners


@given(holdings())
def test_what_is_missing_is_what_nobody_holds(held: list[dict[str, Extent]]) -> None:
    found = missing(SIZES, held)
    gone = {(name, e) for name, gaps in found.items() for gap in gaps for e in range(gap.start, gap.stop)}
    assert gone == {(n, e) for n, size in SIZES.items() for e in range(size) if not owners_of(n, e, held)}


def test_ranks_that_hold_everything_share_one_piece_per_parameter() -> None:
    assert pieces_of(SIZES, [whole(SIZES)] * 2) == tuple(Piece(n, 0, size, (0, 1)) for n, size in SIZES.items())
    assert missing(SIZES, [whole(SIZES)]) == {}


@pytest.mark.parametrize(
    "holding", [{"z": Extent(0, 1)}, {"a": Extent(0, 8)}, {"a": Extent(-1, 2)}, {"a": Extent(3, 2)}]
)
def test_a_holding_outside_of_the_model_is_refused(holding: dict[str, Extent]) -> None:
    with pytest.raises(ValueError, match="rank 0 holds"):
        pieces_of(SIZES, [holding])


def test_overlap() -> None:
    assert overlap(Extent(0, 4), Extent(2, 9)) == Extent(2, 4)
    assert overlap(Extent(0, 4), Extent(4, 9)) is None
