"""What an evaluation reads: a data set with a length, a stream that every rank reads, or a DataLoader's data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from heterotrain.data import batches
from heterotrain.data.slices import EpochSlice
from heterotrain.data.sources import NumberedStream, source_of
from heterotrain.data.streamed import Streamed
from heterotrain.errors import UsageError
from heterotrain.state.admission import whole_number

BATCH_SAMPLES = 64
"""Samples of a batch where neither the script nor a DataLoader says it."""
Evaluated = batches.MapDataset | NumberedStream | Iterable[Any] | DataLoader[Any]
Divide = Callable[[int], tuple[tuple[int, int], ...]]
"""Returns the stretches of so many samples that the ranks of a rank's member take, the rank's own one first."""


class EvaluatedData:
    """A data set for one evaluation, in its own order.

    Attributes:
        batch_samples: samples of a batch at most.
        source: reads it.
        is_stream: whether it can only be iterated, so that every rank reads all of it and keeps its part.
    """

    def __init__(self, data: Any, *, batch_samples: int | None, collate: batches.Collate | None, seed: int) -> None:
        """Accept a data set, or that of a DataLoader with its batch size and ``collate_fn``.

        Raises:
            UsageError: this is no data set, a DataLoader draws or batches samples in a way of its own, or
                ``batch_samples`` is below 1.
        """
        if isinstance(data, DataLoader):
            _check_loader(data)
            batch_samples = data.batch_size if batch_samples is None else batch_samples
            data, collate = data.dataset, collate or data.collate_fn
        given = BATCH_SAMPLES if batch_samples is None else batch_samples
        self.batch_samples = whole_number("batch_samples", given, least=1)
        self._is_empty = (
            hasattr(data, "__len__") and not isinstance(data, torch.utils.data.IterableDataset) and not len(data)
        )
        self.source = source_of([()] if self._is_empty else data, collate=collate, shuffle=False, seed=seed)
        self.is_stream = isinstance(self.source, Streamed)

    def samples(self) -> int:
        """Return the number of samples.

        Raises:
            UsageError: this is a stream, whose number is known at its end.
        """
        found = self.source.samples
        if found is None:
            raise UsageError(
                "a model that is cut into stages is evaluated on a data set with len() and indices: put the samples "
                f"of {type(self.source.dataset).__name__} into a list"
            )
        return 0 if self._is_empty else found

    def slices(self, divide: Divide, *, block_samples: int) -> Iterator[tuple[EpochSlice, bool]]:
        """Yield a rank's slices, and whether one is empty: then it has a sample for its shape.

        Args:
            divide: returns the parts of the ranks of this rank's member.
            block_samples: samples of a stream that are divided at a time.
        """
        cursor, ends = 0, self._is_empty
        while not ends:
            count, ends = self.source.extent(0, cursor, block_samples if self.is_stream else self.samples())
            for ids in batches.batches_of(divide(count), self.batch_samples):
                start, stop = (ids.start, ids.stop) if ids else (0, 1)
                yield EpochSlice(0, cursor + start, cursor + stop), not ids
            cursor += count


def _check_loader(loader: DataLoader[Any]) -> None:
    """Refuse a DataLoader whose batches cannot be made from its data set, its batch size and its ``collate_fn``.

    Raises:
        UsageError: it is one.
    """
    if loader.batch_size is None:
        raise UsageError(
            "an evaluation makes batches itself, and this DataLoader has a batch_sampler or batch_size=None: pass "
            "loader.dataset, with batch_samples= and collate="
        )
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return
    sampler: Any = loader.sampler
    is_whole = isinstance(sampler, DistributedSampler | RandomSampler | SequentialSampler)
    if not is_whole or getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None):
        raise UsageError(
            f"an evaluation divides a data set, and this DataLoader draws from it by a {type(sampler).__name__}: pass "
            "torch.utils.data.Subset(dataset, indices), with batch_samples= and collate="
        )
