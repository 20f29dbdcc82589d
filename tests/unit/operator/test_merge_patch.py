"""Merge patches: applied to one object, they give the other one, and they name only what differs."""

from __future__ import annotations

import copy
from typing import Any

from heterotrain_operator.kube.verbs import merge_patch
from hypothesis import given
from hypothesis import strategies as st
from support.chaos.api_server import merged

leaves = st.one_of(st.integers(0, 2), st.text("ab", max_size=1), st.lists(st.integers(0, 2), max_size=2))
objects = st.recursive(
    st.dictionaries(st.sampled_from("abc"), leaves),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(leaves, inner)),
    max_leaves=6,
)


@given(objects, objects)
def test_a_patch_makes_one_object_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert merged(before, merge_patch(before, after)) == after


@given(objects)
def test_there_is_nothing_to_send_between_equal_objects(either: dict[str, Any]) -> None:
    assert merge_patch(either, copy.deepcopy(either)) == {}


def test_only_what_differs_is_sent() -> None:
    before = {"step": 5, "plan": {"generation": 1, "revision": 4}, "loss": 0.5, "conditions": [{"type": "Ready"}]}
    after = {"step": 6, "plan": {"generation": 1, "revision": 5}, "conditions": [{"type": "Ready"}]}
    assert merge_patch(before, after) == {"step": 6, "plan": {"revision": 5}, "loss": None}
