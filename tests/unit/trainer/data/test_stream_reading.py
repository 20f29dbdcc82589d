"""A stream that saves its state is continued there, with the same samples; a state that would lose some is not used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from heterotrain.data import stream_reading
from heterotrain.data.prefetch import StreamReader
from heterotrain.data.slices import EpochSlice
from heterotrain.data.sources import source_of
from heterotrain.data.stream_reading import StreamState
from heterotrain.data.streamed import Streamed
from heterotrain.errors import UsageError
from support.stateful_streams import Buffered, Late, OfIterators, Stateful, Stateless

KINDS = {"dataset": Stateful, "iterator": OfIterators, "none": Stateless, "late": Late, "buffered": Buffered}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reading, "STATE_SAMPLES", 16)


def source(dataset: Any) -> Streamed:
    found = source_of(dataset, collate=None, shuffle=True, seed=3)
    assert isinstance(found, Streamed)
    return found


def steps(stream: Streamed, epoch: int, cursor: int, wanted: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the batches of an epoch from a cursor on, each with its cursor."""
    ends = False
    while not ends:
        count, ends = stream.extent(epoch, cursor, wanted)
        yield cursor, stream.load(EpochSlice(epoch, cursor, cursor + count))
        cursor += count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_stream_continues_from_its_state_with_the_same_samples(kind: str, epoch: int) -> None:
    """From every cursor, in another process or in this one; random numbers of the stream included."""
    first = source(KINDS[kind](100))
    whole = {}
    for cursor, batch in steps(first, epoch, 0, 6):
        state = first.state(epoch, cursor)
        whole[cursor] = batch, state.encoded() if state else b""
    for cursor, (_, state) in whole.items():
        dataset = KINDS[kind](100)
        resumed = source(dataset)
        resumed.known = StreamState.decoded(state)
        for at, batch in steps(resumed, epoch, cursor, 6):
            torch.testing.assert_close(batch, whole[at][0], rtol=0, atol=0)
        dropped = dataset.reads - (100 - cursor)
        if kind in ("dataset", "iterator"):
            # a state lies at most two distances back: the next one is complete only when it has been checked
            assert 0 <= dropped < 2 * 16
        elif kind == "none":
            assert dropped == cursor


@pytest.mark.parametrize("kind", ["late", "buffered"])
def test_a_state_that_loses_or_repeats_samples_is_reported(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The epoch is then read from its beginning."""
    first = source(KINDS[kind](100))
    for cursor, _ in steps(first, 0, 0, 10):
        known = first.state(0, cursor)
    resumed = source(KINDS[kind](100))
    resumed.known = known
    with caplog.at_level(logging.WARNING):
        resumed.extent(0, 90, 5)
    assert "does not continue from its own state_dict" in caplog.text


@pytest.mark.parametrize("is_seeded", [True, False])
def test_a_stream_without_states_that_has_another_order_is_reported(
    is_seeded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reading is the same, from its beginning; a resumed run must not mix two orders without a word."""

    class Shuffled:
        def __iter__(self) -> Iterator[torch.Tensor]:
            order = torch.randperm(100) if is_seeded else torch.tensor(sorted(range(100), key=lambda _: next(entropy)))
            return iter(order.to(torch.float64))

    entropy = iter(torch.rand(1000, generator=torch.Generator().manual_seed(1)).tolist())
    first = source(Shuffled())
    for cursor, _ in steps(first, 0, 0, 10):
        known = first.state(0, cursor)
    assert known is not None
    assert known.state == b""
    resumed = source(Shuffled())
    resumed.known = StreamState.decoded(known.encoded())
    assert resumed.unread(0, 90) == 90
    with caplog.at_level(logging.WARNING):
        list(steps(resumed, 0, 90, 5))
    expected = [] if is_seeded else [f"other samples after sample {known.position} of epoch 0 than the first time"]
    assert [sentence for sentence in expected if sentence in caplog.text] == expected
    assert len(caplog.records) == len(expected)


def test_a_state_that_is_refused_ends_the_training_with_a_sentence() -> None:
    """The data set has changed since."""

    class Refusing(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError(f"shard_index, not {sorted(state)}")

    resumed = source(Refusing(100))
    resumed.known = StreamState(epoch=0, position=16, state=stream_reading.encode([{"position": 16}]), digest="")
    with pytest.raises(UsageError, match=r"does not take over the state .*shard_index.*start with another checkpoint"):
        resumed.extent(0, 20, 5)


def test_states_of_other_epochs_and_later_positions_are_not_used() -> None:
    """A state is good for its epoch, from its position on."""
    stream = source(Stateful(100))
    stream.known = StreamState(epoch=1, position=16, state=b"state", digest="")
    assert stream.state(0, 50) is None
    assert stream.state(1, 15) is None
    assert stream.state(1, 16) == stream.known
    assert stream.unread(1, 40) == 24
    assert stream.unread(0, 40) == 40


def test_reading_in_another_process_continues_from_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sends states with the samples, and begins at one."""
    monkeypatch.setattr(stream_reading, "STATE_SAMPLES", 256)  # as in the other process
    here, ahead = source(Stateful(700)), source(Stateful(700))
    StreamReader(ahead)
    for cursor in (0, 300, 600):
        assert here.extent(1, cursor, 90) == ahead.extent(1, cursor, 90)
        assert here.state(1, cursor) == ahead.state(1, cursor)
    resumed = source(Stateful(700))
    resumed.known = here.state(1, 600)
    assert resumed.known is not None
    assert resumed.known.position == 512
    StreamReader(resumed)
    assert resumed.unread(1, 600) == 88
    resumed.extent(1, 600, 100)
    part = EpochSlice(1, 600, 690)
    here.extent(1, 600, 100)
    torch.testing.assert_close(resumed.load(part), here.load(part), rtol=0, atol=0)


def test_a_state_that_cannot_be_kept_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on without it, and says so once."""

    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"position": object()}

    stream_reading._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for cursor, _ in steps(source(Odd(100)), 0, 0, 10):
            assert cursor >= 0
    assert (
        caplog.text.count("the stream's state_dict is not used, because it contains an object of type builtins.object")
        == 1
    )
