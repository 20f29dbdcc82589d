"""Observations that are kept as rows are the same again, and take a third of the memory."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.packed import PackedObservations, pack, unpack
from hypothesis import given
from hypothesis import strategies as st

numbers = st.floats(allow_nan=False, allow_infinity=False)
moments = st.none() | st.builds(MeanVariance, mean=numbers, variance=st.none() | numbers)
counts = st.integers(0, 2**31)
observations = st.builds(
    Observation,
    member=st.just("uid/0"),
    share_samples=counts,
    micro_batches=counts,
    steps=counts,
    ended_s=numbers,
    warm_up=st.booleans(),
    load=moments,
    forward=moments,
    backward=moments,
    sync=moments,
    update=moments,
    compute=moments,
    step=moments,
    first_bucket_fraction=moments,
    bucket_steps=counts,
    overlapped_s=st.none() | numbers,
    last_bucket_s=st.none() | numbers,
    generation=st.none() | counts,
)


@given(observations)
def test_an_unpacked_observation_is_the_one_that_was_packed(found: Observation) -> None:
    again = unpack(found.member, pack(found))
    assert again == found
    assert [type(each) for each in _values(again)] == [type(each) for each in _values(found)]


def _values(found: Observation) -> list[Any]:
    return [found.share_samples, found.micro_batches, found.steps, found.warm_up, found.bucket_steps, found.generation]


def measured(number: int) -> Observation:
    times = {
        name: MeanVariance(mean=number + place + 0.25, variance=number + place + 0.5)
        for place, name in enumerate(("load", "forward", "backward", "sync", "update", "compute", "step"))
    }
    return Observation(member="uid/0", share_samples=number, steps=7, ended_s=10.0 * number, **times)


def test_a_copy_with_others_keeps_what_it_had() -> None:
    store: PackedObservations[str] = PackedObservations()
    store.put("a", [measured(1), measured(2)])
    other = replace(measured(3), member="persisted/0")
    seen = store.with_others({"b": (other,)})
    store.put("a", [measured(4)])
    store.discard("c")
    assert dict(seen) == {"a": (measured(1), measured(2)), "b": (other,)}
    assert dict(store) == {"a": (measured(4),)}
    assert "b" not in store
    store.discard("a")
    assert not store


@pytest.mark.parametrize(("ended_s", "expected"), [(0.0, [1, 2, 3]), (20.0, [2, 3]), (30.5, [3])])
def test_what_is_recent_is_all_since_a_time_or_the_newest(ended_s: float, expected: list[int]) -> None:
    store: PackedObservations[str] = PackedObservations()
    store.put("a", [measured(number) for number in (1, 2, 3)])
    assert store.since("a", ended_s) == tuple(measured(number) for number in expected)


def test_rows_take_less_than_half_of_the_objects_memory() -> None:
    tracemalloc.start()
    objects = tuple(measured(number) for number in range(1000))
    as_objects, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    rows = tuple(map(pack, objects))
    assert 2 * sum(map(sys.getsizeof, rows)) < as_objects
