"""Worker processes that load samples ahead while this process computes.

For a data set with random access, several processes load micro-batches. A data set that can only be iterated has one
order, so one process reads it sample by sample.

The processes belong to torch's own loader; this module adds the list of upcoming slices. The list assumes that nothing
changes. After a change (shares, members, a repeated step) the prefetched samples are thrown away: a sample belongs to a
step when the step takes it, not when it is read.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from heterotrain.data.progress import step_seed
from heterotrain.data.rng import seeded_rng
from heterotrain.data.slices import EpochSlice, Source
from heterotrain.data.streamed import Streamed, iterator_of
from heterotrain.errors import UsageError


class Prefetcher:
    """Loads the batches of upcoming slices in worker processes."""

    def __init__(self, source: Source, *, workers: int, pin: bool, ahead: int = 2) -> None:
        """Start the processes and wait until each has loaded a sample, which takes seconds.

        Args:
            source: copied to every worker.
            workers: number of processes, at least 1.
            pin: whether to put batches into page-locked memory, from which copies to the accelerator overlap with
                computing.
            ahead: micro-batches that each worker has loaded or is loading.

        Raises:
            UsageError: the source cannot be sent to another process.
        """
        _check_sendable(source)
        self._upcoming = _Upcoming()
        sampler: Any = self._upcoming  # torch expects lists of indices; _SliceDataset takes slices
        self._loader: DataLoader[Any] = DataLoader(
            _SliceDataset(source), batch_sampler=sampler, num_workers=workers, collate_fn=_as_is, pin_memory=pin,
            persistent_workers=True, prefetch_factor=ahead, multiprocessing_context="forkserver",
            generator=torch.Generator(),  # the loader draws a seed: not from the generator that the model uses
        )  # fmt: skip
        self._upcoming.slices = iter([EpochSlice(0, 0, 1)] * workers)
        self._batches: Iterator[Any] = iter(self._loader)
        for _ in range(workers):
            next(self._batches)
        self._upcoming.sent.clear()

    def take(self, part: EpochSlice, following: Callable[[], Iterator[EpochSlice]]) -> Any:
        """Return the batch of ``part``, on the CPU; if another slice was expected, prefetched batches are thrown away.

        Args:
            part: the next slice of the current step.
            following: yields ``part`` and the slices after it, assuming that nothing changes.

        Raises:
            Exception: an error of the data set in the worker process, with the same type.
        """
        if not self._upcoming.sent or self._upcoming.sent[0] != part:
            self._upcoming.slices = following()
            self._upcoming.sent.clear()
            self._batches = iter(self._loader)
        self._upcoming.sent.popleft()
        return next(self._batches)


class StreamReader:
    """A process that reads a stream ahead of the training."""

    def __init__(self, source: Streamed, *, ahead_samples: int = 256) -> None:
        """Start the process and wait until it is up, which takes seconds; from now on the source reads through it.

        Args:
            source: the source; its data set is sent to the process.
            ahead_samples: samples that the process has read or is reading.

        Raises:
            UsageError: the data set cannot be sent to another process.
        """
        _check_sendable(source.dataset)
        self._stream = _PackedStream(source.dataset, seed=source.seed)
        self._loader: DataLoader[Any] = DataLoader(
            self._stream, batch_size=None, num_workers=1, collate_fn=_as_is, persistent_workers=True,
            prefetch_factor=max(1, ahead_samples // PACK_SAMPLES), multiprocessing_context="forkserver",
            generator=torch.Generator(),
        )  # fmt: skip
        self._packs = iter(self._loader)
        next(self._packs)
        source.begin = self.begin

    def begin(self, epoch: int) -> Iterator[Any]:
        """Yield an epoch's samples from its beginning; prefetched samples of another epoch are thrown away."""
        self._stream.epoch.fill_(epoch)
        self._packs = iter(self._loader)
        for pack in self._packs:
            yield from pack


class _PackedStream(IterableDataset[list[Any]]):
    """The stream in packs of samples, because each object passed between processes costs a tenth of a millisecond."""

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self.epoch = torch.full((1,), NO_EPOCH)
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._dataset = dataset
        self._seed = seed

    def __iter__(self) -> Iterator[list[Any]]:
        torch.set_num_threads(1)
        epoch = int(self.epoch)
        if epoch == NO_EPOCH:
            yield []
            return
        with seeded_rng(step_seed(seed=self._seed, epoch=epoch, position=0)):
            samples = iterator_of(self._dataset, epoch)
            while pack := list(islice(samples, PACK_SAMPLES)):
                yield pack


PACK_SAMPLES = 16
NO_EPOCH = -1


class _Upcoming:
    """The loader's sampler: upcoming slices, and a copy of those already sent to the workers."""

    def __init__(self) -> None:
        self.slices: Iterator[EpochSlice] = iter(())
        self.sent: deque[EpochSlice] = deque()

    def __iter__(self) -> Iterator[EpochSlice]:
        for part in self.slices:
            self.sent.append(part)
            yield part


class _SliceDataset(Dataset[Any]):
    """The source as a data set for torch's loader; a slice takes the place of the list of indices."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, _index: int) -> Any:
        raise NotImplementedError("slices only")

    def __getitems__(self, part: EpochSlice) -> Any:
        torch.set_num_threads(1)
        return self._source.load(part)


def _check_sendable(thing: Any) -> None:
    try:
        pickle.dumps(thing)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the data set or its collate function cannot be sent to worker processes ({error}). Define it at the top "
            "level of a module, or use workers=0."
        ) from error


def _as_is(batch: Any) -> Any:
    return batch
