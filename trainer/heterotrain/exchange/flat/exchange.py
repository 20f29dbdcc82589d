"""One all-reduce for each bucket, over its owners: the exact exchange."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from heterotrain.exchange.flat.transfers import Transfer, transfers_s
from heterotrain.exchange.interface import Bucket
from heterotrain.exchange.timeline import HostTimeline, ReductionTimestamps, Timeline
from heterotrain.network.group import Group
from heterotrain.network.sums import Reduction


class FlatExchange:
    """Adds up each bucket as it is; see ``Exchange``."""

    is_exact = True

    def __init__(self) -> None:
        self.is_held = False
        self.started = 0
        self.bytes_sent = 0
        self.timestamps = ReductionTimestamps()
        self.timeline: Timeline = HostTimeline()
        self._transfers: list[Transfer] = []
        self._group: Group | None = None
        self._is_new = True

    def use(self, buckets: Sequence[Bucket], timeline: Timeline) -> None:
        """Add up these buckets from now on, in their order."""
        self._transfers = [Transfer(bucket) for bucket in buckets]
        self.timeline, self._is_new = timeline, True

    def begin(self, group: Group | None) -> None:
        """Begin a step's last backward pass in a formation (``None``: no peers)."""
        self._is_new = self._is_new or group is not self._group
        self._group, self.started = group, 0
        self.is_held = self._is_new and group is not None and group.world_size > 1
        self.timestamps = ReductionTimestamps(began=self.timeline.now())
        for transfer in self._transfers:
            transfer.bucket.is_complete = False
            transfer.work = transfer.timed = transfer.started = transfer.done = None

    def start(self, bucket: Bucket) -> None:
        """Add up a complete bucket as soon as all before it have been started."""
        bucket.is_complete = True
        transfers = self._transfers
        while not self.is_held and self.started < len(transfers) and transfers[self.started].bucket.is_complete:
            self._launch(transfers[self.started])

    def release(self) -> None:
        """Start the buckets that were held, now that all ranks are known to have the same ones."""
        self.is_held = self._is_new = False
        if self._transfers:
            self.start(self._transfers[0].bucket)

    def finish(self) -> Iterable[Bucket]:
        """Yield each bucket when its sum is there; see ``Exchange``."""
        return () if self._group is None else self._arrivals(self._group)

    def _arrivals(self, group: Group) -> Iterator[Bucket]:
        for number, transfer in enumerate(self._transfers, 1):
            if transfer.work is not None:
                group.wait(transfer.work, f"gradient bucket {number} of {len(self._transfers)}")
                if number == len(self._transfers):
                    transfer.done = self.timeline.now()
                self._arrived(transfer, group)
                yield transfer.bucket
        self.timestamps.waited = self.timeline.now()
        for transfer in self._transfers:
            transfer.timed = transfer.work if transfer.work is not None and transfer.work.is_timed else None
            transfer.work = None

    def abandon(self) -> None:
        """Drop a failed pass; waits until its sums have released the buffers (cut the group first)."""
        self.is_held = False
        for transfer in self._transfers:
            if transfer.work is not None:
                transfer.work.settle()
                transfer.work = None

    def transfers_s(self) -> tuple[float, ...]:
        """Return each bucket's seconds on the network in the last pass that has finished; empty if not known."""
        timed = [transfer.timed for transfer in self._transfers if transfer.timed is not None]
        if timed:
            lengths_s = [work.seconds() for work in timed]
            return tuple(s for s in lengths_s if s is not None) if None not in lengths_s else ()
        return transfers_s(self._transfers, self.timestamps, self.timeline)

    def _launch(self, transfer: Transfer) -> None:
        self.started += 1
        transfer.started = self.timeline.now()
        if self.timestamps.first_bucket is None:
            self.timestamps.first_bucket = transfer.started
        if self._group is None or self._group.world_size == 1:
            return
        transfer.work = self._send(transfer, self._group)
        if self.started == len(self._transfers) or transfer.work.is_timed:
            return  # gloo's thread would wait for the interpreter lock; ``finish`` records the last bucket's end

        def note(_future: object) -> None:
            transfer.done = self.timeline.now()

        transfer.work.get_future().add_done_callback(note)

    def _send(self, transfer: Transfer, group: Group) -> Reduction:
        return self._add_up(transfer.bucket.flat, transfer.bucket, group)

    def _add_up(self, flat: torch.Tensor, bucket: Bucket, group: Group) -> Reduction:
        self.bytes_sent += flat.nbytes
        return group.all_reduce(flat, bucket.owners)

    def _arrived(self, transfer: Transfer, group: Group) -> None:
        """Take a sum from the network."""
