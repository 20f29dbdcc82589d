"""A formation whose ranks are threads of one process: exchanges are lists, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
LIMIT_S = 60.0


class ThreadPeers:
    """What one rank sees of the formation: the exchanges of ``heterotrain.network.group.Group`` by their names."""

    def __init__(self, rank: int, rows: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(rows)
        self._rows, self._barrier = rows, barrier

    def gather_now(self, values: Sequence[float], _purpose: int = 0) -> list[list[float]]:
        """Return every rank's numbers."""
        return [list(row) for row in self._exchange(list(values))]

    def gather(self, data: bytes, _purpose: int = 0) -> Any:
        """Return every rank's bytes, as an exchange that has ended."""
        rows = self._exchange(data)
        assert len({len(row) for row in rows}) == 1, "every rank has to send the same number of bytes"

        class Ended:
            def __init__(self) -> None:
                self.rows = rows

        return Ended()

    def all_reduce(self, flat: torch.Tensor) -> Any:
        """Add up the vectors of all ranks in place."""
        rows = self._exchange(flat.clone())
        assert len({(row.numel(), row.dtype) for row in rows}) == 1, "every rank has to send the same vector"
        flat.copy_(torch.stack(rows).sum(0))
        return flat

    def wait(self, work: Any, what: str = "") -> None:
        """Return at once: exchanges have ended when they are started."""

    def _exchange(self, own: Any) -> list[Any]:
        self._rows[self.rank] = own
        self._barrier.wait(LIMIT_S)
        found = list(self._rows)
        self._barrier.wait(LIMIT_S)
        return found


def on_ranks(count: int, work: Callable[[ThreadPeers], _T]) -> list[_T]:
    """Return what each rank's ``work`` returns, by rank."""
    rows: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(rank: int) -> _T:
        try:
            return work(ThreadPeers(rank, rows, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(run, rank) for rank in range(count)]
    failed = [error for each in running if (error := each.exception()) is not None]
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [each.result() for each in running]
