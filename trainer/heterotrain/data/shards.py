"""A stream of records in shards (files, objects), read shard by shard."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

from heterotrain.data.order import order_name, permutation
from heterotrain.data.shard_cache import ShardCache
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
        cache: ShardCache | None = None,
    ) -> None:
        """Describe the shards; none is opened yet.

        Args:
            shards: arguments for ``open_shard``, for example paths.
            counts: number of records in each shard, from which every rank computes where each rank reads.
            open_shard: returns a shard's records as a sequence; costly work belongs in ``collate``.
            seed: seed for the order.
            shuffle: draw a new order for each epoch.
            keep: number of shards that stay open.
            cache: keeps local copies of remote shards. The shards are then URIs, and ``open_shard`` gets the path of a
                local file, to open or read at once.

        Raises:
            UsageError: the counts do not match the shards, or a shard to be cached is not a URI.
        """
        if len(shards) != len(counts) or any(count < 0 for count in counts):
            raise UsageError(f"Shards needs one count for each of the {len(shards)} shards, not {list(counts)[:8]}")
        if cache is not None and not all(isinstance(shard, str) for shard in shards):
            raise UsageError("Shards with a cache takes the shards' URIs, and open_shard gets the path of a local copy")
        self._cache = cache
        self._shards = list(shards)
        self._counts = list(counts)
        self._starts = [0, *accumulate(counts)]
        self._open = open_shard
        self._seed = seed
        self._shuffle = shuffle
        self._keep = max(1, keep)
        self._opened: OrderedDict[int, Sequence[Any]] = OrderedDict()
        self._epoch: tuple[int, list[int], list[int]] | None = None

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

    @property
    def order(self) -> str:
        """The name of the order, for checkpoints."""
        return order_name(seed=self._seed, shuffle=self._shuffle, samples=len(self))

    def _places(self, epoch: int, start: int, stop: int) -> list[tuple[int, int]]:
        order, ends = self._shards_of(epoch)
        places, position = [], start
        while position < stop:
            index = bisect_right(ends, position)
            shard = order[index]
            begin = ends[index] - self._counts[shard]
            until = min(stop, ends[index])
            records = permutation(
                seed=self._seed, epoch=f"{epoch} shard {shard}", epoch_samples=self._counts[shard],
                shuffle=self._shuffle, start=position - begin, stop=until - begin,
            )  # fmt: skip
            places += [(shard, record) for record in records.tolist()]
            position = until
        return places

    def _shards_of(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return the order of an epoch's shards, and the records up to the end of each; kept for one epoch."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = permutation(
                seed=self._seed, epoch=f"{epoch} shards", epoch_samples=len(self._shards), shuffle=self._shuffle
            ).tolist()
            self._epoch = (epoch, order, list(accumulate(self._counts[shard] for shard in order)))
        return self._epoch[1:]

    def _read(self, shard: Any) -> Sequence[Any]:
        if self._cache is None:
            return self._open(shard)
        with self._cache.local(shard) as path:
            return self._open(cast("_S", path))

    def _records(self, shard: int) -> Sequence[Any]:
        if shard not in self._opened:
            records = self._read(self._shards[shard])
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
