"""Checks that all ranks have the same data, in the same order, when they meet, because later it is too late.

Each rank describes its data by a row of numbers: how many samples, which order, and a look at a few of them. At the
start of a job a difference is an error of all ranks. Later the newcomer alone is refused, and the others train on.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heterotrain.checkpoints.record import HASHED_SAMPLES, add_sample, looked_at
from heterotrain.data.progress import step_seed
from heterotrain.data.rng import seeded_rng
from heterotrain.data.slices import EpochSlice, Source
from heterotrain.data.streamed import Streamed

_log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Relative difference of a sample's mean and standard deviation that different devices may cause."""
HEAD = 4
WIDTH = 3
"""Numbers of each sample: a digest of what has to be equal, and the sums of means and deviations of its tensors."""
ADVICE = (
    "Every rank takes its part of the whole data set by itself: leave out sharding by rank "
    "(split_by_node, shard(world, rank), DistributedSampler), sort files by name, and draw random data after "
    "heterotrain.init, which seeds all ranks alike"
)


@dataclass(frozen=True, slots=True)
class Description:
    """The data of one rank.

    Attributes:
        samples: of an epoch; -1 while unknown.
        order: digest of the order's name.
        looks: of each sample that was looked at, ``WIDTH`` numbers; none where this rank cannot read its data.
    """

    samples: int
    order: float
    looks: tuple[tuple[float, ...], ...]

    def row(self, *, trained: bool) -> list[float]:
        """Return the description as numbers; ``trained``: whether this rank has trained with it."""
        flat = [number for look in self.looks for number in look]
        flat += [0.0] * (HASHED_SAMPLES * WIDTH - len(flat))
        return [float(self.samples), self.order, float(len(self.looks)), float(trained), *flat]


def describe(source: Source, *, seed: int) -> Description:
    """Return the description of a rank's data; reads a few samples of the first epoch."""
    looks = _first_of_stream(source, seed=seed) if isinstance(source, Streamed) else _looks(source)
    samples = -1 if isinstance(source, Streamed) else source.samples  # a stream's length is known at its end
    return Description(-1 if samples is None else samples, _number(hashlib.sha256(source.order.encode())), looks)


def difference(first: Sequence[float], other: Sequence[float], positions: Sequence[str]) -> str:
    """Return in which way the second row differs from the first one, for a sentence; empty if it does not.

    ``positions`` are names of the samples that were looked at.
    """
    if first[0] != other[0]:
        return f"{other[0]:.0f} samples instead of {first[0]:.0f}"
    if first[1] != other[1]:
        return "another order of samples (seed or shuffle=)"
    for index, name in enumerate(positions[: int(min(first[2], other[2]))]):
        start = HEAD + WIDTH * index
        if not _is_same(first[start : start + WIDTH], other[start : start + WIDTH]):
            return f"another {name}"
    return ""


def names_of(source: Source) -> list[str]:
    """Return names of the samples that ``describe`` looks at."""
    if isinstance(source, Streamed):
        return ["first sample of its stream"]
    return [f"sample {source.ids(0, position, position + 1)[0]}" for position in looked_at(source)]


def _looks(source: Source) -> tuple[tuple[float, ...], ...]:
    return tuple([_look(source.load(EpochSlice(0, position, position + 1))) for position in looked_at(source)])


def _first_of_stream(source: Streamed, *, seed: int) -> tuple[tuple[float, ...], ...]:
    """Look at the first sample that this rank's own stream yields; a rank that cannot read it has none to compare."""
    try:
        with seeded_rng(step_seed(seed=seed, epoch=0, position=0), np.random.MT19937(0)):
            first = source.first_sample()
    except Exception as error:  # noqa: BLE001  # another rank may be the one that reads
        _log.debug("this rank cannot read the stream: %s", error)
        return ()
    return () if first is None else (_look(first),)


def _look(sample: Any) -> tuple[float, ...]:
    digest, floats = hashlib.sha256(), list[float]()
    add_sample(digest, sample, floats)
    return (_number(digest), math.fsum(floats[::2]), math.fsum(floats[1::2]))


def _number(digest: Any) -> float:
    return float(int.from_bytes(digest.digest()[:6], "little"))  # float64 carries it exactly


def _is_same(first: Sequence[float], other: Sequence[float]) -> bool:
    if first[0] != other[0]:
        return False
    scale = math.fsum(map(abs, (*first[1:], *other[1:])))
    return not math.isfinite(scale) or all(
        abs(a - b) <= TOLERANCE * scale for a, b in zip(first[1:], other[1:], strict=True)
    )
