"""The order of samples: each once, the same everywhere, and as mixed as a drawn one."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations
from math import factorial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from heterotrain.data.order import (
    BLOCK,
    Bijection,
    order_name,
    permutation,
)
from heterotrain.data.shards import Shards
from heterotrain.data.sources import source_of
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import chdtrc  # not scipy.stats, which takes seconds to import
from support.repeat import times

CERTAIN = 1e-6
"""A test with fixed seeds fails only for an order that chance would give once in a million runs."""


def order(count: int, *, seed: int = 0, epoch: int = 0, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
    """Return a part of the order of one epoch."""
    return permutation(seed=seed, epoch=epoch, epoch_samples=count, shuffle=True, start=start, stop=stop)


def chance(found: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return how often chance would give frequencies that are at least as uneven, by Pearson's chi-square test."""
    difference = np.asarray(found) - np.asarray(expected)
    return float(chdtrc(difference.size - 1, (difference**2 / np.asarray(expected)).sum()))


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_each_sample_comes_once(count: int, seed: int, epoch: int) -> None:
    """For any length, seed and epoch."""
    assert sorted(order(count, seed=seed, epoch=epoch).tolist()) == list(range(count))


@given(st.integers(1, 2**61), st.lists(st.integers(0, 2**61), min_size=1, max_size=50, unique=True))
def test_no_sample_comes_twice_in_a_huge_epoch(count: int, places: list[int]) -> None:
    """Different positions give different samples, all of them within the data set."""
    bijection = Bijection.of("key", count=count)
    found = [int(bijection.at(place, place + 1)[0]) for place in {place % count for place in places}]
    assert len(set(found)) == len(found)
    assert all(0 <= sample < count for sample in found)


@given(count=st.integers(1, 3 * BLOCK), cuts=st.tuples(st.integers(0, 3 * BLOCK), st.integers(0, 3 * BLOCK)))
def test_a_part_is_the_same_by_itself(count: int, cuts: tuple[int, int]) -> None:
    """Whoever computes a slice gets the samples that the whole epoch has there."""
    start, stop = sorted(cut % (count + 1) for cut in cuts)
    assert order(count, start=start, stop=stop).tolist() == order(count)[start:stop].tolist()


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    """These values were computed once; another machine or version of numpy must not change them."""
    assert order(10, seed=1, epoch=2).tolist() == KNOWN_SMALL
    assert order(10**9, seed=1, epoch=2, start=123_456_789, stop=123_456_793).tolist() == KNOWN_LARGE
    assert order(50, seed=1).tolist() != order(50, seed=2).tolist()
    assert order(50, epoch=1).tolist() != order(50, epoch=2).tolist()
    assert permutation(seed=1, epoch=2, epoch_samples=4, shuffle=False).tolist() == [0, 1, 2, 3]


KNOWN_SMALL = [1, 8, 0, 3, 4, 7, 6, 9, 2, 5]
KNOWN_LARGE = [194412765, 249376534, 919242623, 429213161]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_order_of_a_tiny_data_set_is_equally_likely(count: int) -> None:
    """Chi-square test over all orders."""
    draws = times(gate=20, every=200) * factorial(count)
    found = Counter(tuple(Bijection.of(draw, count=count).at(0, count).tolist()) for draw in range(draws))
    frequencies = [found[each] for each in permutations(range(count))]
    assert chance(frequencies, [draws / len(frequencies)] * len(frequencies)) > CERTAIN


@pytest.mark.parametrize("count", [7, 16, 30, 64])
def test_every_sample_is_equally_likely_at_every_position(count: int) -> None:
    """Chi-square test over all pairs of position and sample."""
    draws = times(gate=30, every=100) * count
    seen = np.zeros((count, count))
    for draw in range(draws):
        seen[np.arange(count), Bijection.of(draw, count=count).at(0, count)] += 1
    statistic = ((seen - draws / count) ** 2 / (draws / count)).sum()
    assert chdtrc((count - 1) ** 2, statistic) > CERTAIN


@pytest.mark.parametrize("count", [97, 1000, 65536])
def test_neighbours_are_unrelated(count: int) -> None:
    """The distance from a sample to the one after it is as even over the data set as in a random order."""
    bins = 16
    seen = np.zeros(bins)
    for epoch in range(-(-20_000 // count)):
        steps = np.diff(order(count, epoch=epoch)) % count
        seen += np.histogram(steps, bins=bins, range=(0, count))[0]
    expected = np.histogram(np.arange(1, count), bins=bins, range=(0, count))[0]
    assert chance(seen, expected / expected.sum() * seen.sum()) > CERTAIN


def test_epochs_and_seeds_are_unrelated() -> None:
    """The rank correlation of the orders of two epochs, or of two seeds, is that of chance."""
    orders = [order(5000, seed=seed, epoch=epoch) for seed in range(4) for epoch in range(4)]
    for index, one in enumerate(orders):
        for other in orders[index + 1 :]:
            deviations = abs(np.corrcoef(one, other)[0, 1]) * math.sqrt(len(one) - 1)
            assert math.erfc(deviations / math.sqrt(2)) > CERTAIN


class Huge:
    """A data set of which nothing is in memory."""

    def __len__(self) -> int:
        return 10**15

    def __getitem__(self, index: int) -> int:
        return index


def test_a_huge_data_set_needs_no_table() -> None:
    """A table of these positions would need eight petabytes."""
    source = source_of(Huge(), collate=None, shuffle=True, seed=0)
    assert len(set(source.ids(3, 10**15 - 8, 10**15))) == 8


def test_a_huge_shard_needs_no_table() -> None:
    """The same for the order of records within a shard."""
    shards = Shards(["a", "b"], [10**15, 10**15], lambda _name: range(10**15))
    found = shards.ids(0, 10**15 - 4, 10**15 + 4)
    assert len({record // 10**15 for record in found[:4]}) == len({record // 10**15 for record in found[4:]}) == 1
    assert len(set(found)) == 8


def test_orders_have_names() -> None:
    """Whatever changes the order of samples changes the name."""
    cases = ((0, True, 9), (1, True, 9), (0, True, 8), (0, False, 9))
    names = {order_name(seed=seed, shuffle=shuffle, samples=samples) for seed, shuffle, samples in cases}
    assert len(names) == len(cases)
    of_huge = order_name(seed=1, shuffle=True, samples=len(Huge()))
    assert source_of(Huge(), collate=None, shuffle=True, seed=1).order == of_huge
    of_shards = order_name(seed=1, shuffle=True, samples=2)
    assert source_of(Shards(["a"], [2], list, seed=1), collate=None, shuffle=False, seed=0).order == of_shards
