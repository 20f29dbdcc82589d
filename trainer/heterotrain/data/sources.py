"""Where samples come from: the same samples, in the same order, on every rank.

Three kinds of data sets are understood. One with a length and indices (*map-style*) is read in an order drawn for each
epoch. One with a length and ``read(epoch, start, stop)`` (*numbered stream*) brings its own order and is entered
anywhere. One that can only be iterated (*stream*) may have any length; every rank reads all of it and keeps its part.

Whatever a data set draws at random while it is read comes from generators that depend on the seed and the place in the
epoch alone: neither worker processes nor a repeated step change a sample.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.random import mtrand

from heterotrain.data import batches
from heterotrain.data.progress import Progress, next_batch_samples, permutation, step_seed
from heterotrain.errors import UsageError


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples ``[start, stop)`` of an epoch, in its order: what one micro-batch takes."""

    epoch: int
    start: int
    stop: int


class Source(Protocol):
    """An epoch's samples in order."""

    @property
    def samples(self) -> int | None:
        """Samples of one epoch; ``None`` while unknown."""

    @property
    def is_numbered(self) -> bool:
        """Whether a piece can be loaded anywhere, by any process."""

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return how many of the next ``wanted`` samples after ``cursor`` there are, and whether the epoch ends there."""

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the numbers of samples ``[start, stop)`` within the data set."""

    def load(self, piece: Piece) -> Any:
        """Return the batch of a piece."""


@runtime_checkable
class NumberedStream(Protocol):
    """A data set that brings its own order and can be entered anywhere.

    It may have ``ids(epoch, start, stop)``, too: the numbers of those samples within the whole data set, for the log.
    """

    def __len__(self) -> int:
        """Return the samples of one epoch."""

    def read(self, epoch: int, start: int, stop: int, /) -> Sequence[Any]:
        """Return samples ``[start, stop)`` of an epoch: the same ones whenever and wherever they are asked for."""


def source_of(dataset: Any, *, collate: batches.Collate | None, shuffle: bool, seed: int) -> Source:
    """Return the source that reads this data set.

    Raises:
        UsageError: it is empty, or of no kind that is understood.
    """
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise UsageError(
            "give job.steps the data set itself, not a DataLoader: batch and share come from the plan; collate= and workers= "
            "take what else the loader was told"
        )
    sized = hasattr(dataset, "__len__") and not isinstance(dataset, torch.utils.data.IterableDataset)
    if sized and len(dataset) == 0:
        raise UsageError("the data set is empty")
    if sized and isinstance(dataset, NumberedStream):
        return Numbered(dataset=dataset, collate=collate, seed=seed)
    if sized and hasattr(dataset, "__getitem__"):
        return Mapped(dataset=dataset, collate=collate, shuffle=shuffle, seed=seed)
    if hasattr(dataset, "__iter__") and not isinstance(dataset, Iterator):
        return Streamed(dataset=dataset, collate=collate, seed=seed)
    raise UsageError(
        f"a {type(dataset).__name__} is no data set: job.steps takes one with len() and [index], with len() and "
        "read(epoch, start, stop), or one that can be iterated again for each epoch"
    )


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """A map-style data set in an order of each epoch."""

    dataset: batches.MapDataset
    collate: batches.Collate | None
    shuffle: bool
    seed: int
    is_numbered: bool = True

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return len(self.dataset)

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return what is left of the epoch, at most ``wanted``; a whole number of samples is known from the start."""
        return _left(self.samples, epoch, cursor, wanted)

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the indices that the epoch's order holds there."""
        order = permutation(seed=self.seed, epoch=epoch, epoch_samples=self.samples, shuffle=self.shuffle)
        return list(order[start:stop].tolist())

    def load(self, piece: Piece) -> Any:
        """Return the batch of a piece."""
        with chance(step_seed(seed=self.seed, epoch=piece.epoch, position=piece.start)):
            return batches.fetch(self.dataset, self.ids(piece.epoch, piece.start, piece.stop), self.collate)


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """A stream that can be entered anywhere."""

    dataset: NumberedStream
    collate: batches.Collate | None
    seed: int
    is_numbered: bool = True

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return len(self.dataset)

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return what is left of the epoch, at most ``wanted``."""
        return _left(self.samples, epoch, cursor, wanted)

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return what the stream calls these samples; their places in the epoch where it has no names for them."""
        named = getattr(self.dataset, "ids", None)
        return list(named(epoch, start, stop)) if callable(named) else list(range(start, stop))

    def load(self, piece: Piece) -> Any:
        """Return the batch of a piece.

        Raises:
            UsageError: the stream returned another number of samples.
        """
        with chance(step_seed(seed=self.seed, epoch=piece.epoch, position=piece.start)):
            samples = list(self.dataset.read(piece.epoch, piece.start, piece.stop))
            if len(samples) != piece.stop - piece.start:
                raise UsageError(
                    f"read({piece.epoch}, {piece.start}, {piece.stop}) returned {len(samples)} samples instead of "
                    f"{piece.stop - piece.start}: it has to agree with len()"
                )
            return batches.collated(samples, self.collate)


@dataclass(kw_only=True)
class Streamed:
    """A stream that can only be read from its beginning; holds the samples of the next step and one more.

    Every rank reads every sample, so all of them find the end at the same place. To go on in the middle of an epoch, what
    lies before is read and dropped. What is costly belongs into ``collate``, which sees this rank's samples only.
    """

    dataset: Any
    collate: batches.Collate | None
    seed: int
    is_numbered: bool = False
    samples: int | None = None
    _epoch: int = -1
    _first: int = 0
    _window: deque[Any] = field(default_factory=deque)
    _rest: Iterator[Any] | None = None
    _chance: _States | None = None

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return how many samples there are, by reading them and one more.

        Raises:
            UsageError: the stream ended before the cursor.
        """
        if epoch != self._epoch or cursor < self._first:
            self._open(epoch)
        with self._own_chance():
            while self._first < cursor and (self._window or self._pull()):
                self._window.popleft()
                self._first += 1
            while len(self._window) <= wanted and self._pull():
                pass
        if not self._window:
            raise UsageError(
                f"the stream of epoch {epoch} ended after {self._first} samples where more were expected: it has to yield "
                "something, and the same on every rank and in every run"
            )
        ends = len(self._window) <= wanted
        if ends:
            self.samples = cursor + len(self._window)
        return min(len(self._window), wanted), ends

    def ids(self, _epoch: int, start: int, stop: int) -> list[int]:
        """Return the samples' places in the epoch; a stream has no other names for them."""
        return list(range(start, stop))

    def load(self, piece: Piece) -> Any:
        """Return the batch of a piece of the step whose extent was asked for last."""
        samples = [self._window[number - self._first] for number in range(piece.start, piece.stop)]
        with chance(step_seed(seed=self.seed, epoch=piece.epoch, position=piece.start)):
            return batches.collated(samples, self.collate)

    def _open(self, epoch: int) -> None:
        self._epoch, self._first = epoch, 0
        self._window.clear()
        set_epoch = getattr(self.dataset, "set_epoch", None)
        with chance(step_seed(seed=self.seed, epoch=epoch, position=0), np.random.MT19937(0)):
            if callable(set_epoch):
                set_epoch(epoch)
            self._rest = iter(self.dataset)
            self._chance = _States.now()

    def _pull(self) -> bool:
        nothing = object()
        sample = next(self._rest, nothing) if self._rest is not None else nothing
        if sample is nothing:
            self._rest = None
            return False
        self._window.append(sample)
        return True

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Let the stream draw on where it stopped, whatever was drawn elsewhere meanwhile."""
        before = _States.now()
        if self._chance is not None:
            self._chance.put_back()
        try:
            yield
        finally:
            self._chance = _States.now()
            before.put_back()


_SPARE = np.random.MT19937(0)
"""Takes the place of numpy's generator while samples are read: made once, because that takes longer than seeding it."""


@dataclass(frozen=True, slots=True)
class _States:
    """The generators that data sets draw from without being asked to: torch's, Python's and numpy's global ones."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @staticmethod
    def now() -> _States:
        # numpy's is exchanged, not copied: reading its state and writing it back takes longer than a small step's samples
        return _States(torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator())

    def put_back(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        mtrand.set_bit_generator(self.numpy)


@contextmanager
def chance(seed: int, numpys: np.random.MT19937 = _SPARE) -> Iterator[None]:
    """Seed the global generators of the CPU for a while; afterwards they are as they were.

    ``numpys`` takes the place of numpy's meanwhile, for those who want to go on with it later.
    """
    before = _States.now()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    mtrand.set_bit_generator(numpys)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what data sets draw from without being asked to
    try:
        yield
    finally:
        before.put_back()


def _left(samples: int, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
    if cursor >= samples:
        raise UsageError(
            f"epoch {epoch} has {samples} samples, but {cursor} of it are committed already: training has to go on with the "
            "data that it began with"
        )
    count = next_batch_samples(Progress(cursor=cursor), global_batch_samples=wanted, epoch_samples=samples)
    return count, cursor + count == samples
