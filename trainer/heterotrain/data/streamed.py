"""A data set that can only be iterated: keeps an exact position, and only the next step's samples in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heterotrain.data import batches
from heterotrain.data.order import UNSHUFFLED
from heterotrain.data.progress import step_seed
from heterotrain.data.rng import RngStates, seeded_rng
from heterotrain.data.slices import EpochSlice
from heterotrain.data.stream_reading import StreamReading, StreamReadings, StreamState
from heterotrain.errors import UsageError


@dataclass(kw_only=True)
class Streamed:
    """A stream that can only be read in its own order; holds the samples of the next step and a few more.

    A rank either reads it (``extent``) or gets the samples of its slice from the rank that does (``hold``). To continue
    in the middle of an epoch, reading begins at a state of the stream, or at its beginning, and drops the earlier
    samples. Costly work belongs in ``collate``, which gets this rank's samples only.

    Attributes:
        dataset: the data set, iterated once for each epoch.
        collate: makes a batch from a list of samples; ``None`` for torch's own.
        seed: the job's seed, at least 0.
        one_reader: whether one rank reads for all of them; otherwise every rank reads every sample.
        order: the name of the order, which is the stream's own.
        is_numbered: whether any process can load any slice: false.
        samples: samples of an epoch; ``None`` before the end of the first one.
        known: a state from which to read, perhaps of another epoch.
    """

    dataset: Any
    collate: batches.Collate | None
    seed: int
    one_reader: bool = True
    order: str = UNSHUFFLED
    is_numbered: bool = False
    samples: int | None = None
    known: StreamState | None = None
    _begin: Callable[[int, StreamState | None], Iterator[StreamReading]] | None = None
    _epoch: int = -1
    _first: int = 0
    _window: deque[Any] = field(default_factory=deque)
    _states: deque[StreamState] = field(default_factory=deque)
    _held: tuple[int, list[Any]] | None = None
    _rest: Iterator[StreamReading] | None = None
    _rng: RngStates | None = None
    _readings: StreamReadings = field(init=False)

    def read_in(self, begin: Callable[[int, StreamState | None], Iterator[StreamReading]]) -> None:
        """Read in another process, where ``begin`` begins an epoch, perhaps from a state."""
        self._begin = begin

    def __post_init__(self) -> None:
        self._readings = StreamReadings(self.dataset, seed=self.seed)

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return how many of the next ``wanted`` samples there are, and whether the epoch ends there.

        This reads them and one more.

        Args:
            epoch: from 0.
            cursor: committed samples of the epoch; if it lies before the samples in memory, the epoch is read again.
            wanted: a step's samples over all ranks.

        Raises:
            UsageError: the stream ended before the cursor.
        """
        self._held = None
        if not self._is_open(epoch, cursor):
            self._open(epoch, cursor)
        with self._own_rng():
            while self._first < cursor and (self._window or self._pull()):
                self._window.popleft()
                self._first += 1
            while len(self._window) <= wanted and self._pull():
                pass
        if not self._window:
            raise UsageError(
                f"the stream of epoch {epoch} ended after {self._first} samples, but more were expected. "
                "It must not be empty, and must yield the same samples on every rank and in every run."
            )
        ends = len(self._window) <= wanted
        if ends:
            self.samples = cursor + len(self._window)
        return min(len(self._window), wanted), ends

    def first_sample(self) -> Any:
        """Return the first sample of the first epoch as this process reads it; ``None`` of an empty stream."""
        reading = next(self._readings.begin(0), None)
        return None if reading is None else reading.sample

    def unread(self, epoch: int, cursor: int) -> int:
        """Return how many samples this rank would have to read and drop before the cursor."""
        if self._is_open(epoch, cursor):
            return max(0, cursor - self._first - len(self._window))
        state = self.state(epoch, cursor)
        return cursor - (state.position if state and state.state else 0)

    def state(self, epoch: int, cursor: int) -> StreamState | None:
        """Return the latest known state of the epoch that lies at or before the cursor."""
        while len(self._states) > 1 and self._states[1].position <= cursor:
            self._states.popleft()
        found = [state for state in (self.known, *self._states) if state is not None]
        usable = [state for state in found if state.epoch == epoch and state.position <= cursor]
        return max(usable, key=lambda state: state.position, default=None)

    def hold(self, start: int, samples: list[Any]) -> None:
        """Take samples from position ``start`` of the epoch on, which another rank has read."""
        self._held = start, samples

    def part(self, start: int, stop: int) -> list[Any]:
        """Return samples ``[start, stop)`` of the epoch, which are in memory."""
        first, samples = self._held or (self._first, self._window)
        return [samples[number - first] for number in range(start, stop)]

    def ids(self, _epoch: int, start: int, stop: int) -> list[int]:
        """Return the samples' positions in the epoch; a stream has no other numbers for them."""
        return list(range(start, stop))

    def load(self, part: EpochSlice, *, keeps_rng: bool = True) -> Any:  # noqa: ARG002  # they are kept anyway
        """Return the batch of a slice of the last step that was passed to ``extent`` or ``hold``."""
        samples = self.part(part.start, part.stop)
        with seeded_rng(step_seed(seed=self.seed, epoch=part.epoch, position=part.start)):
            return batches.collated(samples, self.collate)

    def _is_open(self, epoch: int, cursor: int) -> bool:
        return epoch == self._epoch and cursor >= self._first

    def _open(self, epoch: int, cursor: int) -> None:
        since = self.state(epoch, cursor)
        self._epoch, self._first = epoch, since.position if since else 0
        self._window.clear()
        self._states.clear()
        self.known = since
        if self._begin is not None:
            self._rest = self._begin(epoch, since)
        else:
            with seeded_rng(step_seed(seed=self.seed, epoch=epoch, position=0), np.random.MT19937(0)):
                self._rest = self._readings.begin(epoch, since)
                self._rng = RngStates.current()
        with self._own_rng():
            self._pull()

    def _pull(self) -> bool:
        reading = next(self._rest, None) if self._rest is not None else None
        if reading is None:
            self._rest = None
            return False
        if not self._window and reading.position < self._first:
            self._first = reading.position  # the state was of no use
        self._window.append(reading.sample)
        if reading.state is not None:
            self._states.append(reading.state)
        return True

    @contextmanager
    def _own_rng(self) -> Iterator[None]:
        """Continue the stream's own random sequence inside the ``with`` block, independent of other draws."""
        if self._rng is None:  # the stream is read in another process
            yield
            return
        before = RngStates.current()
        self._rng.restore()
        try:
            yield
        finally:
            self._rng = RngStates.current()
            before.restore()
