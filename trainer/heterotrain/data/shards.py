"""A stream of records in shards (files, objects), read shard by shard."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from heterotrain.errors import UsageError

_S = TypeVar("_S")


class Shards(Generic[_S]):
    """Records in shards, for ``job.steps``: each epoch has a new order of the shards, and of the records in each shard.

    Neighbouring samples come from the same shard, so shards are opened rarely instead of once per sample. Every rank
    opens every shard. A record's number is its position in the concatenation of all shards.
    """

    def __init__(
        self,
        shards: Sequence[_S],
        counts: Sequence[int],
        open_shard: Callable[[_S], Sequence[Any]],
        *,
        seed: int = 0,
        shuffle: bool = True,
        keep: int = 2,
    ) -> None:
        """Describe the shards; none is opened yet.

        Args:
            shards: arguments for ``open_shard``, for example paths.
            counts: number of records in each shard, from which every rank computes where each rank reads.
            open_shard: returns a shard's records as a sequence; costly work belongs in ``collate``.
            seed: seed for the order.
            shuffle: draw a new order for each epoch.
            keep: number of shards that stay open.

        Raises:
            UsageError: the counts do not match the shards.
        """
        if len(shards) != len(counts) or any(count < 0 for count in counts):
            raise UsageError(f"Shards needs one count for each of the {len(shards)} shards, not {list(counts)[:8]}")
        self._shards = list(shards)
        self._counts = list(counts)
        self._starts = [0, *accumulate(counts)]
        self._open = open_shard
        self._seed = seed
        self._shuffle = shuffle
        self._keep = max(1, keep)
        self._opened: OrderedDict[int, Sequence[Any]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of records in all shards."""
        return self._starts[-1]

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the numbers of records ``[start, stop)`` of an epoch, each from 0 to ``len() - 1``."""
        return [self._starts[shard] + record for shard, record in self._places(epoch, start, stop)]

    def read(self, epoch: int, start: int, stop: int) -> list[Any]:
        """Return records ``[start, stop)`` of an epoch, from one or several shards, which are opened as needed.

        Raises:
            UsageError: the number of records in a shard differs from its count.
        """
        return [self._records(shard)[record] for shard, record in self._places(epoch, start, stop)]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": OrderedDict()}  # a worker process opens its own

    def _places(self, epoch: int, start: int, stop: int) -> list[tuple[int, int]]:
        order = self._order(epoch, 0, len(self._shards))
        ends = list(accumulate(self._counts[shard] for shard in order))
        places, position = [], start
        while position < stop:
            index = bisect_right(ends, position)
            shard = int(order[index])
            begin = ends[index] - self._counts[shard]
            until = min(stop, ends[index])
            records = self._order(epoch, 1 + shard, self._counts[shard])[position - begin : until - begin]
            places += [(shard, int(record)) for record in records]
            position = until
        return places

    def _order(self, epoch: int, what: int, count: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(count)
        return np.random.Generator(np.random.PCG64([self._seed, epoch, what])).permutation(count)

    def _records(self, shard: int) -> Sequence[Any]:
        if shard not in self._opened:
            records = self._open(self._shards[shard])
            if len(records) != self._counts[shard]:
                raise UsageError(
                    f"shard {self._shards[shard]!r} holds {len(records)} records instead of {self._counts[shard]}: "
                    "correct its entry in counts"
                )
            self._opened[shard] = records
            while len(self._opened) > self._keep:
                self._opened.popitem(last=False)
        self._opened.move_to_end(shard)
        return self._opened[shard]
