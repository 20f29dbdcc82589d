"""Worker processes that load samples ahead while this process computes.

For a data set with random access, several processes load micro-batches. A data set that can only be iterated has one
order, so one process reads it sample by sample.

The processes belong to torch's own loader; this module adds the list of upcoming slices. The list assumes that nothing
changes. After a change (shares, members, a repeated step) the prefetched samples are thrown away: a sample belongs to a
step when the step takes it, not when it is read. Each list has a number, and processes drop work of an earlier list at
once: torch's loader would finish it before it takes the first new slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from heterotrain.data.loader_process import ProcessInit, WorkerInit, Workers, loader_context, sendable, starting
from heterotrain.data.progress import step_seed
from heterotrain.data.rng import seeded_rng
from heterotrain.data.shared_copy import SharedCopy
from heterotrain.data.slices import EpochSlice, Source
from heterotrain.data.sources import Mapped
from heterotrain.data.stream_reading import StreamReading, StreamReadings, StreamState
from heterotrain.data.streamed import Streamed


class Prefetcher:
    """Loads the batches of upcoming slices in worker processes."""

    def __init__(self, source: Source, *, workers: Workers, pin: bool) -> None:
        """Start the processes and wait until each has loaded a sample, which takes seconds.

        Args:
            source: copied to every worker.
            workers: the processes, at least one.
            pin: whether to put batches into page-locked memory, from which copies to the accelerator overlap with
                computing.

        Raises:
            UsageError: the source cannot be sent to another process, or the processes do not start.
        """
        shared = sendable(source, collate=source.collate, init_fn=workers.init_fn)
        self._upcoming = _Upcoming()
        dataset = _SliceDataset(shared, newest=self._upcoming.number)
        sampler: Any = self._upcoming  # torch expects lists of indices; _SliceDataset takes slices
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=sampler, num_workers=workers.count, collate_fn=_as_is, pin_memory=pin,
            persistent_workers=True, prefetch_factor=workers.prefetch_factor,
            worker_init_fn=ProcessInit(workers.init_fn, shared, is_source=True),
            multiprocessing_context=loader_context(source.dataset, source.collate, workers.init_fn),
            generator=torch.Generator(),  # the loader draws a seed: not from the generator that the model uses
        )  # fmt: skip
        self._upcoming.begin(iter([EpochSlice(0, 0, 1)] * workers.count))
        with starting():
            self._batches: Iterator[Any] = iter(self._loader)
            for _ in range(workers.count):
                next(self._batches)
        shared.close()
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
            self._upcoming.begin(following())
            self._batches = iter(self._loader)
        self._upcoming.sent.popleft()
        return next(self._batches)


class StreamReader:
    """A process that reads a stream ahead of the training."""

    def __init__(self, source: Streamed, *, init_fn: WorkerInit | None = None, ahead_samples: int = 256) -> None:
        """Start the process and wait until it is up, which takes seconds; from now on the source reads through it.

        Args:
            source: the source; its data set is sent to the process.
            init_fn: called in the process with 0 before it reads; ``None`` for no call.
            ahead_samples: samples that the process has read or is reading.

        Raises:
            UsageError: the data set cannot be sent to another process, or the process does not start.
        """
        shared = sendable(source.dataset, collate=None, init_fn=init_fn)
        context = loader_context(source.dataset, init_fn)
        self._orders: SimpleQueue[tuple[int, StreamState | None]] = context.SimpleQueue()
        self._loader: DataLoader[Any] = DataLoader(
            _PackedStream(shared, seed=source.seed, orders=self._orders), batch_size=None, num_workers=1,
            collate_fn=_as_is, persistent_workers=True, prefetch_factor=max(1, ahead_samples // PACK_SAMPLES),
            worker_init_fn=ProcessInit(init_fn, shared, is_source=False), multiprocessing_context=context,
            generator=torch.Generator(),
        )  # fmt: skip
        with starting():
            self._packs = self._begun(NO_EPOCH, None)
            next(self._packs)
        shared.close()
        source.read_in(self.begin)

    def begin(self, epoch: int, since: StreamState | None) -> Iterator[StreamReading]:
        """Yield an epoch's samples from a state on or from its beginning; prefetched ones of another are thrown away.

        The process begins at once.
        """
        self._packs = self._begun(epoch, since)
        return chain.from_iterable(self._packs)

    def _begun(self, epoch: int, since: StreamState | None) -> Iterator[list[StreamReading]]:
        self._orders.put((epoch, since))  # the process takes one order for each iterator of the loader
        return iter(self._loader)


class _PackedStream(IterableDataset[list[StreamReading]]):
    """The stream in packs of samples, because each object passed between processes costs a tenth of a millisecond."""

    def __init__(self, dataset: SharedCopy, *, seed: int, orders: SimpleQueue[tuple[int, StreamState | None]]) -> None:
        self._dataset = dataset
        self._seed = seed
        self._orders = orders
        self._readings: StreamReadings | None = None

    def __iter__(self) -> Iterator[list[StreamReading]]:
        epoch, since = self._orders.get()
        if epoch == NO_EPOCH:
            yield []
            return
        if self._readings is None:
            self._readings = StreamReadings(self._dataset.load(), seed=self._seed)
        with seeded_rng(step_seed(seed=self._seed, epoch=epoch, position=0)):
            readings = self._readings.begin(epoch, since)
            while pack := list(islice(readings, PACK_SAMPLES)):
                yield pack


PACK_SAMPLES = 16
NO_EPOCH = -1


@dataclass(frozen=True, slots=True)
class _Work:
    """One slice, as sent to a process, with the number of the list that it belongs to."""

    part: EpochSlice
    number: int


class _Upcoming:
    """The loader's sampler: upcoming slices, and a copy of those already sent to the workers.

    Attributes:
        number: number of the current list, in memory that all processes share.
    """

    def __init__(self) -> None:
        self.sent: deque[EpochSlice] = deque()
        self.number = torch.zeros(1, dtype=torch.int64)
        self.number.share_memory_()
        self._slices: Iterator[EpochSlice] = iter(())

    def begin(self, slices: Iterator[EpochSlice]) -> None:
        """Replace the list; from now on processes drop the work of the earlier one."""
        self._slices = slices
        self.sent.clear()
        self.number += 1

    def __iter__(self) -> Iterator[_Work]:
        number = int(self.number)
        for part in self._slices:
            self.sent.append(part)
            yield _Work(part, number)


class _OutdatedError(Exception):
    """The slice being loaded belongs to an earlier list."""


class _Interruptible:
    """A data set with indices; its slices end before the next sample when they are outdated."""

    def __init__(self, dataset: Any, is_outdated: Callable[[], bool]) -> None:
        self._dataset = dataset
        self._is_outdated = is_outdated

    def __getitem__(self, index: int) -> Any:
        if self._is_outdated():
            raise _OutdatedError
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)


class _SliceDataset(Dataset[Any]):
    """The source as a data set for torch's loader; a slice takes the place of the list of indices."""

    def __init__(self, shared: SharedCopy, *, newest: torch.Tensor) -> None:
        self._shared = shared
        self._source: Source | None = None
        self._newest = newest
        self._number = -1

    def __getitem__(self, _index: int) -> Any:
        raise NotImplementedError("slices only")

    def __getitems__(self, work: _Work) -> Any:
        self._number = work.number
        try:
            return None if self._is_outdated() else self._own().load(work.part)
        except _OutdatedError:
            return None

    def _own(self) -> Source:
        """Return this process's source, whose slices end early."""
        if self._source is None:
            source: Source = self._shared.load()
            if isinstance(source, Mapped) and not callable(getattr(source.dataset, "__getitems__", None)):
                source = replace(source, dataset=_Interruptible(source.dataset, self._is_outdated))
            self._source = source
        return self._source

    def _is_outdated(self) -> bool:
        return self._number != int(self._newest)


def _as_is(batch: Any) -> Any:
    return batch
