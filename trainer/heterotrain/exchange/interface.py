"""How the gradients of members meet: a rank fills buckets in its backward passes, and an exchange adds them up.

``Gradients`` is this rank's side: it moves gradients into buckets, keeps the script from changing them before they are
sums, and computes with the sums. ``Reducer`` is that of whole models, ``PieceReducer`` that of pieces of a model, whose
buckets have owners of their own. ``Exchange`` is the way between ranks.

In a step's last backward pass the order is ``begin``, ``start`` of each bucket, ``finish``; after a loss, ``abandon``
in place of ``finish``. Buckets start in the same order on all of their owners, in whatever order they are complete.
"""
# ruff: noqa: ARG002, D102  # Reducer documents the other members of Gradients; some do nothing for pieces

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heterotrain.exchange.gate import Gate
from heterotrain.exchange.script_hooks import ScriptHooks
from heterotrain.exchange.timeline import HostTimeline, ReductionTimestamps, Timeline, Timestamp
from heterotrain.network.group import Group
from heterotrain.network.sums import Reduction
from heterotrain.state.finite import all_finite


@dataclass(slots=True, eq=False, kw_only=True)
class Bucket:
    """Gradients that are added up together.

    Attributes:
        flat: the buffer that holds them, one dimension.
        owners: the ranks, ascending, that add it up, this one included; ``None`` for all ranks.
        missing: parameters without a gradient so far in the current backward pass.
        is_complete: whether it holds all gradients of the current backward pass.
    """

    flat: torch.Tensor
    owners: tuple[int, ...] | None = None
    missing: int = 0
    is_complete: bool = False


@dataclass(slots=True, eq=False)
class Transfer:
    """One bucket's way, in one step after the other.

    Attributes:
        bucket: the bucket.
        work: its sum; ``None`` before it has been started, and when it has been waited for.
        timed: its sum after the wait, where that knows how long it took.
        started: when it began.
        done: when it ended; ``None`` until that is recorded.
    """

    bucket: Bucket
    work: Reduction | None = None
    timed: Reduction | None = None
    started: Timestamp | None = None
    done: Timestamp | None = None


class Exchange(ABC):
    """Adds up buckets over their owners.

    Attributes:
        is_exact: whether each sum is that of the gradients up to the rounding of their own format.
        is_held: whether buckets wait for ``release``: the first time in a formation, and with other buckets. A sum of
            buckets that differ between ranks would hang, or end the process inside torch.
        started: number of buckets that have been started in this pass.
        bytes_sent: handed to sums with other ranks, until a committed step takes the count.
        timestamps: of the newest pass.
        timeline: of the device that holds the first bucket.
    """

    is_exact: bool

    def __init__(self) -> None:
        self.is_held = False
        self.started = self.bytes_sent = 0
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

    def is_known_to(self, group: Group) -> bool:
        """Return whether all ranks of a formation are known to have the same buckets."""
        return group is self._group and not self._is_new

    def release(self) -> None:
        """Start the buckets that were held, now that all ranks are known to have the same ones."""
        self.is_held = self._is_new = False
        if self._transfers:
            self.start(self._transfers[0].bucket)

    def finish(self) -> Iterable[Bucket]:
        """Yield each bucket when its sum is there; on an accelerator, the current stream waits for it.

        Raises:
            PeerLost: the group is broken.
        """
        return () if self._group is None else self._arrivals(self._group)

    def _arrivals(self, group: Group) -> Iterator[Bucket]:
        for number, transfer in enumerate(self._transfers, 1):
            if transfer.work is not None:
                group.wait(transfer.work, f"gradient bucket {number} of {len(self._transfers)}")
                if number == len(self._transfers):
                    transfer.done = self.timeline.now()
                self._receive(transfer.bucket, group)
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
        """Return each bucket's seconds on the network in the last pass that has finished; empty if not known.

        Time in which an earlier bucket still occupied the network does not count.
        """
        timed = [transfer.timed for transfer in self._transfers if transfer.timed is not None]
        if timed:
            lengths_s = [work.seconds() for work in timed]
            return tuple(s for s in lengths_s if s is not None) if None not in lengths_s else ()
        began, waited = self.timestamps.began, self.timestamps.waited
        if began is None or waited is None:
            return ()
        found, free_s = [], 0.0
        for transfer in self._transfers:
            done = transfer.done  # may be recorded only after the wait has returned
            if transfer.started is None or (done is not None and not self.timeline.is_past(done)):
                return ()
            done_s = self.timeline.seconds(began, waited if done is None else done)
            found.append(max(0.0, done_s - max(self.timeline.seconds(began, transfer.started), free_s)))
            free_s = max(free_s, done_s)
        return tuple(found)

    def _launch(self, transfer: Transfer) -> None:
        self.started += 1
        transfer.started = self.timeline.now()
        if self.timestamps.first_bucket is None:
            self.timestamps.first_bucket = transfer.started
        if self._group is None or self._group.world_size == 1:
            return
        transfer.work = self._send(transfer.bucket, self._group)
        if self.started == len(self._transfers) or transfer.work.is_timed:
            return  # gloo's thread would wait for the interpreter lock; ``finish`` records the last bucket's end

        def note(_future: object) -> None:
            transfer.done = self.timeline.now()

        transfer.work.get_future().add_done_callback(note)

    def _add_up(self, flat: torch.Tensor, bucket: Bucket, group: Group) -> Reduction:
        self.bytes_sent += flat.nbytes
        return group.all_reduce(flat, bucket.owners)

    @abstractmethod
    def _send(self, bucket: Bucket, group: Group) -> Reduction:
        """Start the sum of a bucket with ``_add_up``."""

    @abstractmethod
    def _receive(self, bucket: Bucket, group: Group) -> None:
        """Take the sum from the network into the bucket."""


class Gradients(ABC):
    """Sums the gradients of one step after the other.

    Attributes:
        exchange: adds up the buckets.
        is_measurable: whether a rank's own gradient is a mean over its samples, taken micro-batch by micro-batch.
        buckets: those whose transfers are measured, in the order in which they are added up.
        flats: this rank's gradients, each or several in one tensor.
        elements: number of elements in this rank's gradients; known once a step has begun.
        parameters: number of trainable parameters on which the ranks vote.
        signature: a checksum of what has to be the same on all ranks.
        script_hooks: hooks of the script on parameters, which rest until the sums are there.
        known_squared: the squared norm without computing it; ``None`` if that is not known.
    """

    exchange: Exchange
    is_measurable = False
    buckets: Sequence[Any] = ()
    flats: list[torch.Tensor]
    elements = parameters = signature = 0
    script_hooks: ScriptHooks
    known_squared: float | None = None

    @property
    def wants_order(self) -> bool:
        return False

    @abstractmethod
    def begin(self, *, micro_batches: int = 1) -> None: ...
    def watch(self, on_gradient: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        return

    def watch_buckets(self, on_complete: Callable[[Any], None]) -> None:
        return

    def give_way(self, group: Group) -> bool:
        return False

    @abstractmethod
    def arm(self, group: Group | None) -> None: ...
    @abstractmethod
    def flush(self) -> None: ...
    @abstractmethod
    def remember(self) -> None: ...
    @abstractmethod
    def check_untouched(self) -> None: ...
    @abstractmethod
    def wait(self) -> None: ...
    @abstractmethod
    def abandon(self) -> None: ...
    @property
    @abstractmethod
    def unused(self) -> int: ...
    @abstractmethod
    def drop_unused(self, unused: int) -> None: ...
    @abstractmethod
    def check_kept(self) -> None: ...
    def take_back(self) -> bool:
        return False

    def scale(self, factor: float) -> None:
        """Multiply every gradient, in place."""
        if flats := self.flats:
            torch._foreach_mul_(flats, factor)

    def clamp(self, limit: float) -> None:
        """Clamp every element of the gradients to [-limit, limit]."""
        for flat in self.flats:
            flat.clamp_(-limit, limit)

    def transfers_s(self) -> tuple[float, ...]:
        """Return the seconds on the network of each of ``buckets``; empty if not known."""
        return self.exchange.transfers_s() if self.buckets else ()

    def is_finite(self) -> bool:
        return all_finite(self.flats)

    def gate(self) -> Gate | None:
        return None

    def lay_out(self) -> None:
        return

    @abstractmethod
    def first_non_finite(self) -> str | None: ...
    @abstractmethod
    def squared_norm(self) -> torch.Tensor | float: ...
    def form(self, group: Group) -> None:
        return

    def agree_on_order(self, group: Group) -> None:
        return
