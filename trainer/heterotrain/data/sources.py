"""Sources of samples: the same samples, in the same order, on every rank.

Three kinds of data sets are supported. One with a length and indices (*map-style*) is read in an order drawn for each
epoch. One with a length and ``read(epoch, start, stop)`` (*numbered stream*) has its own order and can be read from any
position. One that can only be iterated (*stream*) may have any length; one rank reads it and sends each rank its part.

While a data set is read, the global random generators are seeded by the job's seed and the position in the epoch alone.
So neither worker processes nor a repeated step change a sample.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from heterotrain.data import batches
from heterotrain.data.order import UNSHUFFLED, order_name, permutation
from heterotrain.data.progress import step_seed
from heterotrain.data.rng import reseed, seeded_rng
from heterotrain.data.slices import EpochSlice, Source
from heterotrain.data.streamed import Streamed
from heterotrain.errors import UsageError

SHOWN = 3
"""Largest number of keys listed in a message."""


@runtime_checkable
class NumberedStream(Protocol):
    """A data set that has its own order and can be read from any position.

    It may also have ``ids(epoch, start, stop)``: the numbers of these samples within the data set, for the sample log.
    """

    def __len__(self) -> int:
        """Return the samples of one epoch."""

    def read(self, epoch: int, start: int, stop: int, /) -> Sequence[Any]:
        """Return samples ``[start, stop)`` of an epoch; the same ones at any time and in any process."""


def source_of(
    dataset: Any, *, collate: batches.Collate | None, shuffle: bool, seed: int, one_reader: bool = True
) -> Source:
    """Return the source that reads this data set.

    Args:
        dataset: see ``Job.steps``.
        collate: makes a batch from a list of samples; ``None`` for torch's own.
        shuffle: draw a new order for each epoch; only for a data set with indices.
        seed: the job's seed, at least 0.
        one_reader: whether one rank reads a data set that can only be iterated, for all ranks.

    Raises:
        UsageError: the data set is empty or of an unsupported kind.
    """
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise UsageError(
            "job.steps takes the data set itself, not a DataLoader, because batch and share come from the plan. "
            "Pass the loader's other settings as collate= and workers=."
        )
    if isinstance(dataset, Mapping):
        raise UsageError(
            f"a {type(dataset).__name__} is a mapping, not a data set: pass one of its values to job.steps "
            f"({', '.join(map(repr, list(dataset)[:SHOWN]))}{', …' if len(dataset) > SHOWN else ''})"
        )
    if isinstance(dataset, str | bytes | os.PathLike):
        raise UsageError(f"job.steps takes a data set, not the path or name {dataset!r}: load it first")
    sized = hasattr(dataset, "__len__") and not isinstance(dataset, torch.utils.data.IterableDataset)
    if sized and len(dataset) == 0:
        raise UsageError("the data set is empty (its len() is 0): check its path and its filters")
    # A protocol's isinstance checks for the name only, which need not be a method.
    if sized and isinstance(dataset, NumberedStream) and callable(dataset.read):
        return Numbered(dataset=dataset, collate=collate, seed=seed)
    if sized and hasattr(dataset, "__getitem__"):
        return Mapped(dataset=dataset, collate=collate, shuffle=shuffle, seed=seed)
    if hasattr(dataset, "__iter__") and not isinstance(dataset, Iterator):
        return Streamed(dataset=dataset, collate=collate, seed=seed, one_reader=one_reader)
    raise UsageError(
        f"a {type(dataset).__name__} is not a data set. job.steps takes one with len() and [index], with len() and "
        "read(epoch, start, stop), or one that can be iterated again for each epoch."
    )


@dataclass(frozen=True, kw_only=True)
class _Counted(ABC):
    """A data set with a known length, of which any process can load any slice."""

    dataset: Any
    collate: batches.Collate | None
    seed: int
    is_numbered: bool = True

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return len(self.dataset)

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return how many samples are left of the epoch, at most ``wanted``, and whether the epoch ends there.

        Raises:
            UsageError: the epoch has fewer samples than the cursor.
        """
        samples = len(self.dataset)
        if cursor >= samples:
            raise UsageError(
                f"epoch {epoch} has {samples} samples, but {cursor} are already committed: continue with the data set "
                "that the training began with, or start a new job"
            )
        count = min(wanted, samples - cursor)
        return count, cursor + count == samples

    def load(self, part: EpochSlice, *, keeps_rng: bool = True) -> Any:
        """Return the batch of a slice; see ``Source``."""
        seed = step_seed(seed=self.seed, epoch=part.epoch, position=part.start)
        if keeps_rng:
            with seeded_rng(seed):
                return self._batch(part)
        reseed(seed)
        return self._batch(part)

    @abstractmethod
    def _batch(self, part: EpochSlice) -> Any:
        """Read a slice, with generators that are seeded for it."""


@dataclass(frozen=True, kw_only=True)
class Mapped(_Counted):
    """A map-style data set, read in a new order in each epoch."""

    shuffle: bool

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the indices at these positions of the epoch's order."""
        order = permutation(
            seed=self.seed, epoch=epoch, epoch_samples=len(self.dataset), shuffle=self.shuffle, start=start, stop=stop
        )
        return list(order.tolist())

    @property
    def order(self) -> str:
        """The name of the order."""
        return order_name(seed=self.seed, shuffle=self.shuffle, samples=self.samples)

    def _batch(self, part: EpochSlice) -> Any:
        return batches.fetch(self.dataset, self.ids(part.epoch, part.start, part.stop), self.collate)


@dataclass(frozen=True, kw_only=True)
class Numbered(_Counted):
    """A stream that can be read from any position."""

    @property
    def order(self) -> str:
        """The name that the stream gives to its order, if it does."""
        name = getattr(self.dataset, "order", None)
        return name if isinstance(name, str) else UNSHUFFLED

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the stream's own numbers for these samples; without ``ids``, their positions in the epoch."""
        named = getattr(self.dataset, "ids", None)
        return list(named(epoch, start, stop)) if callable(named) else list(range(start, stop))

    def _batch(self, part: EpochSlice) -> Any:
        samples = list(self.dataset.read(part.epoch, part.start, part.stop))
        if len(samples) != part.stop - part.start:
            raise UsageError(
                f"read({part.epoch}, {part.start}, {part.stop}) returned {len(samples)} samples instead of "
                f"{part.stop - part.start}: make read() and len() agree"
            )
        return batches.collated(samples, self.collate)
