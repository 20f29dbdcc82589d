"""Every sample of an epoch comes once: from any position, by any process, and however often it is requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from heterotrain.data.loader_process import Workers
from heterotrain.data.prefetch import Prefetcher, StreamReader
from heterotrain.data.shards import Shards
from heterotrain.data.slices import EpochSlice, Source
from heterotrain.data.sources import Mapped, source_of
from heterotrain.data.streamed import Streamed
from heterotrain.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st
from support.noisy_data import Noisy, Stream


def opened(name: str) -> list[str]:
    """Open the shard with this name: seven records, or none."""
    return [] if name == "empty" else [f"{name}{index}" for index in range(7)]


def shards(**options: Any) -> Shards[str]:
    """Return four shards, one of them empty."""
    return Shards(["a", "b", "empty", "c"], [7, 7, 0, 7], opened, **options)


def sources() -> list[Source]:
    """Return one source of each kind."""
    return [source_of(data, collate=None, shuffle=True, seed=3) for data in (Noisy(21), shards(seed=3), Stream(21))]


def take(source: Source, epoch: int, batch: int, cuts: list[int]) -> Iterator[tuple[list[int], Any]]:
    """Read an epoch in steps, each cut into slices at any position; yield ids and samples of each slice."""
    cursor, ends = 0, False
    while not ends:
        count, ends = source.extent(epoch, cursor, batch)
        edges = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
        for start, stop in pairwise(edges):
            ids = source.ids(epoch, cursor + start, cursor + stop)
            yield ids, source.load(EpochSlice(epoch, cursor + start, cursor + stop))
        cursor += count


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["map", "numbered", "stream"])
@given(batch=st.integers(1, 25), cuts=st.lists(st.integers(0, 25), max_size=4))
def test_each_sample_once_however_it_is_cut(kind: int, batch: int, cuts: list[int]) -> None:
    """This holds in every epoch, and each epoch has a new order."""
    source = sources()[kind]
    orders = []
    for epoch in range(2):
        found = [number for ids, _ in take(source, epoch, batch, cuts) for number in ids]
        assert Counter(found) == Counter(range(21 + (epoch if kind == 2 else 0)))
        orders.append(found)
    assert source.samples == (22 if kind == 2 else 21)
    assert kind == 2 or orders[0] != orders[1]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["map", "numbered", "stream"])
def test_resuming_in_the_middle_of_an_epoch_gives_the_same_samples(kind: int) -> None:
    """A resumed run and a repeated step get the samples of an undisturbed run, including random augmentation."""
    whole = [str(batch) for _, batch in take(sources()[kind], 1, 4, [])]
    for begin in range(0, 20, 4):
        torch.manual_seed(begin)
        source = sources()[kind]
        for index in (0, 0, 1):  # a step, its repeat, and the step after it
            cursor = begin + 4 * index
            count, ends = source.extent(1, cursor, 4) if cursor < 20 else (0, True)
            if count and not ends:
                assert str(source.load(EpochSlice(1, cursor, cursor + 4))) == whole[cursor // 4]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["map", "numbered", "stream"])
def test_reading_leaves_the_models_random_numbers_alone(kind: int) -> None:
    """Dropout draws the same numbers whether or not data are read in this process."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    source = sources()[kind]
    source.extent(0, 0, 4)
    source.load(EpochSlice(0, 0, 4))
    assert torch.equal(torch.rand(3), expected)


def test_a_stream_reads_no_further_than_the_next_step() -> None:
    """One more sample shows whether the epoch is over; samples of earlier steps are dropped."""
    source = source_of(Stream(100), collate=None, shuffle=True, seed=0)
    assert isinstance(source, Streamed)
    for cursor in range(0, 90, 10):
        assert source.extent(0, cursor, 10) == (10, False)
        assert len(source._window) == 11
    assert source.samples is None
    assert source.extent(0, 90, 10) == (10, True)
    assert source.samples == 100


def test_a_changed_data_set_is_refused() -> None:
    """A run cannot continue in the middle of an epoch that has become shorter."""
    with pytest.raises(UsageError, match="ended after 5 samples"):
        source_of(Stream(5), collate=None, shuffle=True, seed=0).extent(0, 8, 4)
    with pytest.raises(UsageError, match="5 samples, but 8"):
        source_of(Noisy(5), collate=None, shuffle=True, seed=0).extent(0, 8, 4)
    with pytest.raises(UsageError, match="ended after 0 samples"):
        source_of(Stream(0), collate=None, shuffle=True, seed=0).extent(0, 0, 4)


@pytest.mark.parametrize("data", [5, iter([1, 2])], ids=["a number", "an iterator"])
def test_other_objects_are_refused(data: Any) -> None:
    """The message describes valid data sets."""
    with pytest.raises(UsageError, match="is not a data set"):
        source_of(data, collate=None, shuffle=True, seed=0)


def test_a_loader_is_not_accepted_as_a_stream() -> None:
    """Otherwise its batches would count as samples."""
    with pytest.raises(UsageError, match="the data set itself, not a DataLoader"):
        source_of(torch.utils.data.DataLoader(Noisy(4)), collate=None, shuffle=True, seed=0)


def test_shards_are_opened_one_after_the_other() -> None:
    """A whole shard is read before the next one is opened."""
    calls: list[str] = []

    def counting(name: str) -> list[str]:
        calls.append(name)
        return opened(name)

    stream = Shards(["a", "b", "empty", "c"], [7, 7, 0, 7], counting, keep=1)
    for start in range(21):
        stream.read(0, start, start + 1)
    assert sorted(calls) == ["a", "b", "c"]
    with pytest.raises(UsageError, match="holds 7 records instead of 8"):
        Shards(["a"], [8], opened).read(0, 0, 1)
    with pytest.raises(UsageError, match="one count for each"):
        Shards(["a"], [8, 3], opened)


def test_worker_processes_change_nothing() -> None:
    """The batches are bitwise equal; after a change, prefetched samples are thrown away."""
    source = source_of(Noisy(64), collate=None, shuffle=True, seed=3)
    prefetcher = Prefetcher(source, workers=Workers(count=2), pin=False)

    def following(begin: int, size: int) -> Iterator[EpochSlice]:
        for epoch in range(2):
            for start in range(begin if epoch == 0 else 0, 64, size):
                yield EpochSlice(epoch, start, min(64, start + size))

    # other shares, a repeated step, an epoch's end
    for begin, size, count in ((0, 8, 3), (24, 5, 4), (24, 5, 10), (16, 16, 5)):
        for part, _ in zip(following(begin, size), range(count), strict=False):
            rest = lambda part=part, size=size: following(part.start, size)  # noqa: E731  # including this slice
            torch.testing.assert_close(prefetcher.take(part, rest), source.load(part), rtol=0, atol=0)


def test_prefetching_does_not_change_a_stream() -> None:
    """Samples, their random numbers and the epoch's end are the same: in mid-epoch, going back, and in a new epoch."""
    here, ahead = (source_of(Stream(100), collate=None, shuffle=True, seed=3) for _ in range(2))
    assert isinstance(ahead, Streamed)
    StreamReader(ahead, ahead_samples=32)
    for epoch, cursor, wanted in ((0, 0, 10), (0, 10, 40), (0, 50, 60), (1, 70, 8), (1, 20, 8), (2, 0, 101)):
        assert here.extent(epoch, cursor, wanted) == ahead.extent(epoch, cursor, wanted)
        part = EpochSlice(epoch, cursor, min(100, cursor + wanted))
        torch.testing.assert_close(here.load(part), ahead.load(part), rtol=0, atol=0)


def test_data_that_cannot_be_sent_to_workers_are_refused() -> None:
    """This happens before any process is started."""
    local = Mapped(dataset=Noisy(4), collate=lambda samples: samples, shuffle=True, seed=0)
    with pytest.raises(UsageError, match="top level of a module"):
        Prefetcher(local, workers=Workers(count=1), pin=False)


def test_an_attribute_that_is_not_a_method_does_not_make_a_stream() -> None:
    """A data set with indices may have any attribute named ``read``."""
    dataset = Noisy(4)
    dataset.read = ["files"]  # type: ignore[attr-defined]  # what is tested
    assert isinstance(source_of(dataset, collate=None, shuffle=False, seed=0), Mapped)
