"""A data set that can only be iterated, read once in total: one rank reads it and sends each rank its own samples.

The reader is the rank that would have to drop the fewest samples to reach the cursor; a formation that loses it chooses
another one. Samples that have no form as bytes cannot be sent: then every rank reads the whole stream.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from heterotrain.data.progress import Progress
from heterotrain.data.sample_codec import NotEncodableError, decode, encode
from heterotrain.data.stream_reading import StreamState
from heterotrain.data.streamed import Streamed
from heterotrain.errors import PeerLost, UsageError
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.roster import slice_of_rank
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Payload, Purpose
from heterotrain.state.training import TrainState

_log = logging.getLogger(__name__)

MAX_MESSAGE = 2000
"""Characters of an error on the reader that the other ranks repeat."""


class MessageKind(IntEnum):
    """What the reader sends."""

    SAMPLES = 0
    EVERYONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Reads:
    """What the reader sends in one step.

    Attributes:
        kind: samples, the request that every rank reads, or an error.
        batch: samples of the step over all ranks.
        ends: whether the epoch ends with it.
        text: a newer state of the stream, or the error.
        parts: samples by rank.
    """

    kind: MessageKind
    batch: int = 0
    ends: bool = False
    text: bytes = b""
    parts: tuple[bytes, ...] = ()


class StreamExchange:
    """Reads or receives this rank's samples of each step of a stream."""

    def __init__(self, source: Streamed, training: TrainState) -> None:
        """``training`` has the state of the stream, as of the last committed step."""
        self._source = source
        self._training = training
        self._group: Group | None = None
        self._reader = 0
        self._everyone_reads = False
        self._newest = b""  # the state of the stream at the last step, committed or not
        self._last: tuple[tuple[object, ...], tuple[int, bool]] | None = None
        self._error: Exception | None = None

    def committed(self) -> None:
        """Keep the stream's state with the training's, because the step is committed."""
        self._training.stream = self._newest

    def extent(
        self,
        active_group: ActiveGroup,
        progress: Progress,
        wanted: int,
        shares_of: Callable[[int], tuple[int, ...]],
    ) -> tuple[int, bool]:
        """Return how many of the next ``wanted`` samples there are, and whether the epoch ends there.

        Afterwards the source holds this rank's samples of the step, of which a rank without any gets the step's first.
        A step that this rank alone repeats needs no other rank.

        Args:
            active_group: the formation.
            progress: before the step.
            wanted: a step's samples over all ranks.
            shares_of: returns the members' shares of a number of samples.

        Raises:
            PeerLost: the group broke meanwhile.
            UsageError: the stream ended before the cursor, or failed on the rank that reads it.
        """
        group, epoch, cursor = active_group.group, progress.epoch, progress.cursor
        if group is not self._group:
            self._group, self._last, self._newest, self._everyone_reads = group, None, self._training.stream, False
            self._source.known = StreamState.decoded(self._newest)
            if group is not None and self._source.one_reader:
                rows = group.gather_now([float(self._source.unread(epoch, cursor))], Purpose.STREAM)
                self._reader = min(range(len(rows)), key=lambda rank: rows[rank][0])
        if group is None:
            found = self._source.extent(epoch, cursor, wanted)
            state = self._source.state(epoch, cursor)
            self._newest = state.encoded() if state else b""
            return found
        if self._everyone_reads or not self._source.one_reader:
            self._newest = b""  # ranks that read ahead differently know different states
            return self._source.extent(epoch, cursor, wanted)
        key = (epoch, cursor, wanted, active_group.roster.plan.version)
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, self._exchange(group, active_group, key[:3], shares_of)
        return self._last[1]

    def _exchange(
        self,
        group: Group,
        active_group: ActiveGroup,
        place: tuple[int, int, int],
        shares_of: Callable[[int], tuple[int, ...]],
    ) -> tuple[int, bool]:
        epoch, cursor, _ = place
        reads = self._read(active_group, place, shares_of) if group.rank == self._reader else Reads(MessageKind.SAMPLES)
        head = struct.Struct(f"<{4 + group.world_size}q")
        sizes = [len(part) for part in reads.parts] or [0] * group.world_size
        packed = head.pack(reads.kind, reads.batch, reads.ends, len(reads.text), *sizes)
        kind, batch, ends, text_bytes, *sizes = head.unpack(self._send(group, [packed] * group.world_size, head.size))
        bodies = [reads.text + part for part in reads.parts] or [reads.text] * group.world_size
        body = self._send(group, bodies, text_bytes + sizes[group.rank])
        text = body[:text_bytes]
        if kind == MessageKind.FAILED:
            self._fail(group, epoch, text)
        if kind == MessageKind.EVERYONE:
            self._everyone_reads, self._newest = True, b""
            if group.rank == self._reader:
                _log.warning("every rank reads the whole stream, because its samples contain %s", text.decode())
            return self._source.extent(*place)
        self._newest = text or self._newest
        state = StreamState.decoded(self._newest)
        if state is not None and state.epoch != epoch:
            self._newest = b""
        if group.rank != self._reader:
            self._source.known = state
            self._source.hold(
                self._slices(active_group, cursor, shares_of(batch))[group.rank][0], decode(body[text_bytes:])
            )
            if ends:
                self._source.samples = cursor + batch
        return batch, bool(ends)

    def _send(self, group: Group, data: Sequence[bytes], size_bytes: int) -> bytes:
        """Return what the reader has for this rank: ``data`` by rank on the reader, ``size_bytes`` bytes elsewhere."""
        what = f"the samples of a stream, which rank {self._reader} reads"
        if group.rank == self._reader:
            outgoing = {
                rank: Payload(len(mine), [memoryview(mine)] if mine else [])
                for rank, mine in enumerate(data)
                if rank != group.rank
            }
            group.send_receive(outgoing, {}, what, Purpose.STREAM)
            return data[group.rank]
        got = bytearray(size_bytes)
        payload = Payload(size_bytes, [memoryview(got)] if got else [])
        group.send_receive({}, {self._reader: payload}, what, Purpose.STREAM)
        return bytes(got)

    def _read(
        self, active_group: ActiveGroup, place: tuple[int, int, int], shares_of: Callable[[int], tuple[int, ...]]
    ) -> Reads:
        """Read the next step's samples.

        Raises:
            OSError: an error of this machine, perhaps: another rank may be able to read.
        """
        epoch, cursor, wanted = place
        self._error = None
        try:
            batch, ends = self._source.extent(epoch, cursor, wanted)
            slices = self._slices(active_group, cursor, shares_of(batch))
            others = [part for rank, part in enumerate(slices) if rank != self._reader]
            encoded = {part: encode(self._source.part(*part)) for part in dict.fromkeys(others)}
        except NotEncodableError as error:
            return Reads(MessageKind.EVERYONE, text=str(error).encode())
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # every rank would meet it
            self._error = error
            return Reads(MessageKind.FAILED, text=f"{type(error).__name__}: {error}"[:MAX_MESSAGE].encode())
        state = self._source.state(epoch, cursor)
        newest = state.encoded() if state else b""
        text = newest if newest != self._newest else b""
        parts = (b"" if rank == self._reader else encoded[part] for rank, part in enumerate(slices))
        return Reads(MessageKind.SAMPLES, batch, ends, text, tuple(parts))

    @staticmethod
    def _slices(active_group: ActiveGroup, cursor: int, shares: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the samples ``[start, stop)`` of the epoch for each rank; the step's first one instead of none."""
        found = []
        for rank in range(len(active_group.roster.plan_ranks)):
            start, stop = slice_of_rank(active_group.roster, shares, rank)
            found.append((cursor + start, cursor + stop) if stop > start else (cursor, cursor + 1))
        return found

    def _fail(self, group: Group, epoch: int, text: bytes) -> NoReturn:
        """Raise the reader's error on every rank, as soon as every rank has it."""
        with contextlib.suppress(PeerLost):
            group.gather_now([0.0], Purpose.STREAM)
        if self._error is not None:
            raise self._error
        raise UsageError(
            f"the stream of epoch {epoch} failed on rank {self._reader}, which reads it for all ranks: "
            + text.decode(errors="replace")
        )
