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
from heterotrain.errors import UsageError


@dataclass(kw_only=True)
class Streamed:
    """A stream that can only be read from its beginning; holds the samples of the next step and one more.

    Every rank reads every sample, so all ranks find the end at the same position. To continue in the middle of an
    epoch, the earlier samples are read and dropped. Costly work belongs in ``collate``, which gets this rank's samples
    only.

    Attributes:
        dataset: the data set, iterated once for each epoch.
        collate: makes a batch from a list of samples; ``None`` for torch's own.
        seed: the job's seed, at least 0.
        order: the name of the order, which is the stream's own.
        is_numbered: whether any process can load any slice: false.
        samples: samples of an epoch; ``None`` before the end of the first one.
        begin: begins an epoch in another process and returns its samples; ``None`` reads in this process.
    """

    dataset: Any
    collate: batches.Collate | None
    seed: int
    order: str = UNSHUFFLED
    is_numbered: bool = False
    samples: int | None = None
    begin: Callable[[int], Iterator[Any]] | None = None
    _epoch: int = -1
    _first: int = 0
    _window: deque[Any] = field(default_factory=deque)
    _rest: Iterator[Any] | None = None
    _rng: RngStates | None = None

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
        if epoch != self._epoch or cursor < self._first:
            self._open(epoch)
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

    def ids(self, _epoch: int, start: int, stop: int) -> list[int]:
        """Return the samples' positions in the epoch; a stream has no other numbers for them."""
        return list(range(start, stop))

    def load(self, part: EpochSlice) -> Any:
        """Return the batch of a slice of the last step that was passed to ``extent``."""
        samples = [self._window[number - self._first] for number in range(part.start, part.stop)]
        with seeded_rng(step_seed(seed=self.seed, epoch=part.epoch, position=part.start)):
            return batches.collated(samples, self.collate)

    def _open(self, epoch: int) -> None:
        self._epoch, self._first = epoch, 0
        self._window.clear()
        if self.begin is not None:
            self._rest = self.begin(epoch)
            return
        with seeded_rng(step_seed(seed=self.seed, epoch=epoch, position=0), np.random.MT19937(0)):
            self._rest = iterator_of(self.dataset, epoch)
            self._rng = RngStates.current()

    def _pull(self) -> bool:
        nothing = object()
        sample = next(self._rest, nothing) if self._rest is not None else nothing
        if sample is nothing:
            self._rest = None
            return False
        self._window.append(sample)
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


def iterator_of(dataset: Any, epoch: int) -> Iterator[Any]:
    """Return the samples of an epoch (from 0) of a data set that can only be iterated; calls ``set_epoch``, if any."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    return iter(dataset)
