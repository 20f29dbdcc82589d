"""Where samples come from: the same samples, in the same order, on every rank.

Three kinds of data sets are understood. One with a length and indices (*map-style*) is read in an order drawn for each
epoch. One with a length and ``read(epoch, start, stop)`` (*numbered stream*) brings its own order and is entered
anywhere. One that can only be iterated (*stream*) may have any length; every rank reads all of it and keeps its part.

Whatever a data set draws at random while it is read comes from generators that depend on the seed and the place in the
epoch alone: neither worker processes nor a repeated step change a sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from heterotrain.data import batches
from heterotrain.data.progress import permutation, step_seed
from heterotrain.data.rng import seeded_rng
from heterotrain.data.slices import EpochSlice, Source
from heterotrain.data.streamed import Streamed
from heterotrain.errors import UsageError

SHOWN = 3
"""Keys that a sentence lists."""


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

    Args:
        dataset: see ``Job.steps``.
        collate: makes a batch of a list of samples; ``None`` stands for torch's own.
        shuffle: draw a new order for each epoch; only for a data set with indices.
        seed: of the job, from 0 on.

    Raises:
        UsageError: it is empty, or of no kind that is understood.
    """
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise UsageError(
            "give job.steps the data set itself, not a DataLoader: batch and share come from the plan; collate= and workers= "
            "take what else the loader was told"
        )
    if isinstance(dataset, Mapping):
        raise UsageError(
            f"a {type(dataset).__name__} is a mapping, not a data set: give job.steps one of its values "
            f"({', '.join(map(repr, list(dataset)[:SHOWN]))}{', …' if len(dataset) > SHOWN else ''})"
        )
    if isinstance(dataset, str | bytes | os.PathLike):
        raise UsageError(f"job.steps takes a data set, not the path or name {dataset!r}: read it first")
    sized = hasattr(dataset, "__len__") and not isinstance(dataset, torch.utils.data.IterableDataset)
    if sized and len(dataset) == 0:
        raise UsageError("the data set is empty, its len() is 0: look at its path and at what it leaves out")
    # A protocol's isinstance looks for a name, not for a method.
    if sized and isinstance(dataset, NumberedStream) and callable(dataset.read):
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
class _Counted:
    """A data set whose length is known, so that any process can load any part of it."""

    dataset: Any
    collate: batches.Collate | None
    seed: int
    is_numbered: bool = True

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return len(self.dataset)

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return what is left of the epoch, at most ``wanted``, and whether the epoch ends there.

        Raises:
            UsageError: less than the cursor says was there once.
        """
        samples = self.samples
        if cursor >= samples:
            raise UsageError(
                f"epoch {epoch} has {samples} samples, but {cursor} of it are committed already: go on with the "
                "data that training began with, or begin a new job"
            )
        count = min(wanted, samples - cursor)
        return count, cursor + count == samples


@dataclass(frozen=True, kw_only=True)
class Mapped(_Counted):
    """A map-style data set in an order of each epoch."""

    shuffle: bool

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the indices that the epoch's order holds there."""
        order = permutation(seed=self.seed, epoch=epoch, epoch_samples=self.samples, shuffle=self.shuffle)
        return list(order[start:stop].tolist())

    def load(self, part: EpochSlice) -> Any:
        """Return the batch of a part."""
        with seeded_rng(step_seed(seed=self.seed, epoch=part.epoch, position=part.start)):
            return batches.fetch(self.dataset, self.ids(part.epoch, part.start, part.stop), self.collate)


@dataclass(frozen=True, kw_only=True)
class Numbered(_Counted):
    """A stream that can be entered anywhere."""

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return what the stream calls these samples; their places in the epoch where it has no names for them."""
        named = getattr(self.dataset, "ids", None)
        return list(named(epoch, start, stop)) if callable(named) else list(range(start, stop))

    def load(self, part: EpochSlice) -> Any:
        """Return the batch of a part.

        Raises:
            UsageError: the stream returned another number of samples.
        """
        with seeded_rng(step_seed(seed=self.seed, epoch=part.epoch, position=part.start)):
            samples = list(self.dataset.read(part.epoch, part.start, part.stop))
            if len(samples) != part.stop - part.start:
                raise UsageError(
                    f"read({part.epoch}, {part.start}, {part.stop}) returned {len(samples)} samples instead of "
                    f"{part.stop - part.start}: it has to agree with len()"
                )
            return batches.collated(samples, self.collate)
