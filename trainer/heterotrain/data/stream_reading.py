"""Reading a data set that can only be iterated: from its beginning, or from a state that it has saved itself.

A stream may have ``state_dict`` and ``load_state_dict``, on itself or on its iterator, as torchdata's
StatefulDataLoader expects them and the iterable data sets of Hugging Face have them. Its state is then taken at every
256th position, together with a digest of the samples that follow. A state that yields other samples later is not used:
where a shuffle buffer is not part of the state, the samples in it would be lost. A stream without states has digests
alone: when it is read again from its beginning and yields other samples, a warning says so.

At the same positions the global generators are seeded by position alone. A stream that draws from them yields the same
samples, from wherever it is read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from heterotrain.data.progress import step_seed
from heterotrain.data.rng import reseed
from heterotrain.data.sample_codec import NotEncodableError, decode, encode
from heterotrain.errors import UsageError

_log = logging.getLogger(__name__)

STATE_SAMPLES = 256
"""Samples between two positions at which the state is taken."""
CHECKED_SAMPLES = 8
"""Samples after such a position by which a state is checked; fewer than ``STATE_SAMPLES``."""
MAX_STATE_BYTES = 1 << 26
"""A larger state is not kept: it would go to every rank every few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A position in a stream, and how to know it again.

    Attributes:
        epoch: from 0.
        position: samples of the epoch before it.
        state: what the stream's ``state_dict`` has returned there, encoded; empty for a stream without one.
        digest: of the next ``CHECKED_SAMPLES`` samples.
    """

    epoch: int
    position: int
    state: bytes
    digest: str

    def encoded(self) -> bytes:
        """Return the bytes for ``decoded``."""
        return encode([self.epoch, self.position, self.state, self.digest])

    @staticmethod
    def decoded(data: bytes) -> StreamState | None:
        """Return the state; ``None`` for no bytes."""
        if not data:
            return None
        epoch, position, state, digest = decode(data)
        return StreamState(epoch=epoch, position=position, state=state, digest=digest)


@dataclass(frozen=True, slots=True)
class StreamReading:
    """One sample of a stream.

    Attributes:
        position: samples of the epoch before it.
        sample: the sample.
        state: a state of which this sample is the last one to check it by; ``None`` for most samples.
    """

    position: int
    sample: Any
    state: StreamState | None = None


class StreamReadings:
    """Reads a data set that can only be iterated, one epoch at a time, in one process."""

    def __init__(self, dataset: Any, *, seed: int) -> None:
        """``dataset`` can be iterated again for each epoch; ``seed`` is the job's, at least 0."""
        self._dataset = dataset
        self._seed = seed
        self._beginning: bytes | None = None
        self._epoch = -1

    def begin(self, epoch: int, since: StreamState | None = None) -> Iterator[StreamReading]:
        """Yield the samples of an epoch from a state on, or from its beginning.

        The generators must be this stream's own while it is read.

        Args:
            epoch: from 0.
            since: where to begin; an epoch is read from its beginning if this has no state or yields other samples.

        Raises:
            UsageError: the stream does not take the state.
        """
        if self._epoch < 0:
            self._beginning = _state_of(self._dataset)
        is_again, self._epoch = self._epoch == epoch, epoch
        if since is not None and since.state:
            samples, holder = self._open(since.epoch, since.state)
            self._reseed(epoch, since.position)
            following = list(islice(samples, CHECKED_SAMPLES))
            if _digest(following) == since.digest:
                yield from self._readings(chain(following, samples), holder, epoch, since.position, is_seeded=True)
                return
            _log.warning(
                "the stream does not continue from its own state_dict with the samples that followed there (a shuffle "
                "buffer would be a reason): it is read from its beginning, and %d samples are dropped", since.position,
            )  # fmt: skip
            is_again = True
        samples, holder = self._open(epoch, self._beginning if is_again else None)
        for reading in self._readings(samples, holder, epoch, 0, is_seeded=False):
            if since is not None and reading.state is not None:
                _warn_of_another_order(reading.state, since)
            yield reading

    def _open(self, epoch: int, state: bytes | None) -> tuple[Iterator[Any], Any]:
        """Return an epoch's iterator from a state on, and the object that has the stream's state."""
        self._reseed(epoch, 0)
        if callable(getattr(self._dataset, "load_state_dict", None)):
            if state is not None:
                _load(self._dataset, state)
            return iterator_of(self._dataset, epoch), self._dataset
        samples = iterator_of(self._dataset, epoch)
        if state is not None:
            _load(samples, state)
        return samples, samples

    def _readings(
        self, samples: Iterator[Any], holder: Any, epoch: int, position: int, *, is_seeded: bool
    ) -> Iterator[StreamReading]:
        """Yield samples, and states as soon as enough samples follow them.

        ``is_seeded`` says whether the generators are seeded for the first position, and its state is known.
        """
        taken: bytes | None = None
        following: list[Any] = []
        nothing = object()
        while True:
            if position % STATE_SAMPLES == 0 and not is_seeded:
                self._reseed(epoch, position)
                taken, following = _state_of(holder) or b"", []
            is_seeded = False
            sample = next(samples, nothing)
            if sample is nothing:
                return
            state = None
            if taken is not None:
                following.append(sample)
                if len(following) == CHECKED_SAMPLES:
                    state = _checked(epoch, position + 1 - CHECKED_SAMPLES, taken, following)
                    taken, following = None, []
            yield StreamReading(position, sample, state)
            position += 1

    def _reseed(self, epoch: int, position: int) -> None:
        reseed(step_seed(seed=self._seed, epoch=epoch, position=position))


def iterator_of(dataset: Any, epoch: int) -> Iterator[Any]:
    """Return the samples of an epoch (from 0) of a data set that can only be iterated; calls ``set_epoch``, if any."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    return iter(dataset)


def _warn_of_another_order(state: StreamState, before: StreamState) -> None:
    """Warn where a stream that was read from its beginning has other samples than before at the same position."""
    if (state.epoch, state.position) == (before.epoch, before.position) and state.digest != before.digest:
        _log.warning(
            "the stream has yielded other samples after sample %d of epoch %d than the first time, so samples are "
            "repeated or missing in this epoch: let its order depend on the epoch alone, for example by a fixed seed",
            before.position, before.epoch,
        )  # fmt: skip


def _checked(epoch: int, position: int, state: bytes, following: list[Any]) -> StreamState | None:
    digest = _digest(following)
    return None if digest is None else StreamState(epoch=epoch, position=position, state=state, digest=digest)


def _load(holder: Any, state: bytes) -> None:
    try:
        holder.load_state_dict(decode(state)[0])
    except Exception as error:
        raise UsageError(
            f"the stream does not take over the state that it has saved ({type(error).__name__}: {error}): continue "
            "with the data set that training began with, or start with another checkpoint folder"
        ) from error


def _state_of(holder: Any) -> bytes | None:
    """Return a stream's state, encoded; ``None`` where it has none, or none that can be kept."""
    take, load = (getattr(holder, name, None) for name in ("state_dict", "load_state_dict"))
    if not callable(take) or not callable(load):
        return None
    try:
        state = encode([take()])
    except NotEncodableError as error:
        _warn_once(f"the stream's state_dict is not used, because it contains {error}")
        return None
    if len(state) > MAX_STATE_BYTES:
        _warn_once(f"the stream's state_dict is not used, because it has more than {MAX_STATE_BYTES} bytes")
        return None
    return state


@lru_cache(maxsize=8)
def _warn_once(message: str) -> None:
    _log.warning(message)


def _digest(samples: list[Any]) -> str | None:
    """Return a digest of samples; ``None`` where they have no form as bytes."""
    try:
        return hashlib.sha256(encode(samples)).hexdigest()
    except NotEncodableError:
        return None
