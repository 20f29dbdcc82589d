"""What ranks that leave pass on: to whom, as far as there is room."""

from __future__ import annotations

from heterotrain.state.hand_over import HandOverReport, heirs, orphans
from heterotrain.state.ranges import TensorRange
from hypothesis import given
from hypothesis import strategies as st

NAMES = "abcdef"


def test_only_what_nobody_else_holds_is_passed_on() -> None:
    """Rank 2 leaves; rank 1 has the tied parameter, too."""
    held = [
        {"a": TensorRange("a", 0, 4)},
        {"b": TensorRange("b", 0, 2), "tied": TensorRange("tied", 0, 3)},
        {"tied": TensorRange("tied", 0, 3), "c": TensorRange("c", 0, 5)},
    ]
    assert orphans(held, {0, 1}) == {"c": TensorRange("c", 0, 5)}
    assert orphans([*held, None], {0, 3}) == {}
    assert orphans([{}, {"b": TensorRange("b", 0, 2)}, None], {0, 1}) == {}


def test_an_empty_parameter_needs_no_holder() -> None:
    assert orphans([{"a": TensorRange("a", 0, 4)}, {"none": TensorRange("none", 0, 0)}], {0}) == {}


def test_shards_of_a_parameter_are_passed_on_whole_if_all_their_ranks_leave() -> None:
    """Also where a staying rank has some of the elements: what it lacks would be gone."""
    held = [{"a": TensorRange("a", 0, 4)}, {"b": TensorRange("b", 0, 3)}, {"b": TensorRange("b", 3, 5)}]
    assert orphans(held, {0}) == {"b": TensorRange("b", 0, 5)}
    assert orphans(held, {0, 1}) == {"b": TensorRange("b", 0, 5)}
    assert orphans([*held, {"b": TensorRange("b", 2, 5)}], {0, 1, 3}) == {}


def report(wants: str = "", room_bytes: int = 0) -> HandOverReport:
    return HandOverReport(wants=set(wants), room_bytes=room_bytes, sizes_bytes={})


def test_who_needs_a_part_next_takes_it() -> None:
    """Also without room for other parts: the next layout was planned for its memory."""
    sizes = dict.fromkeys(NAMES, 10)
    found = heirs("abc", {0: report("ab"), 1: report("bc")}, sizes)
    assert found == {0: ("a", "b"), 1: ("b", "c")}


def test_what_only_joiners_need_goes_where_there_is_room() -> None:
    sizes = {"a": 30, "b": 20, "c": 10}
    assert heirs("abc", {0: report(room_bytes=35), 1: report(room_bytes=30)}, sizes) == {0: ("a",), 1: ("b", "c")}
    assert heirs("abc", {0: report(room_bytes=35), 1: report(room_bytes=29)}, sizes) is None
    assert heirs("abc", {0: report("a", room_bytes=35), 1: report(room_bytes=24)}, sizes) is None


@given(st.data())
def test_every_part_finds_an_heir_and_nobody_takes_more_than_it_has_room_for(data: st.DataObject) -> None:
    """Any wishes, rooms and sizes."""
    sizes = data.draw(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 50), min_size=1))
    ranks = data.draw(st.integers(1, 4))
    given_ = {
        rank: report("".join(data.draw(st.sets(st.sampled_from(NAMES)))), data.draw(st.integers(0, 200)))
        for rank in range(ranks)
    }
    found = heirs(sizes, given_, sizes)
    if found is None:
        return
    assert {name for names in found.values() for name in names} == sizes.keys()
    for rank, names in found.items():
        unwanted = sum(sizes[name] for name in names if name not in given_[rank].wants)
        assert unwanted <= given_[rank].room_bytes
