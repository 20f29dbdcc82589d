"""Observations of many ranks in a third of their memory: each is a row of numbers, and an object when it is used."""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from heterotrain_planner.perf.counters import MeanVariance, Observation

_MOMENTS = ("load", "forward", "backward", "sync", "update", "compute", "step", "first_bucket_fraction")
_ROW = struct.Struct(f"<{9 + 2 * len(_MOMENTS)}d")
"""Whole numbers below 2^53 are exact in it; what is missing is not a number."""
_ENDED = struct.Struct("<d")

_Key = TypeVar("_Key", bound=Hashable)


def pack(found: Observation) -> bytes:
    """Return an observation as a row, without the name of its member."""
    moments = (getattr(found, name) for name in _MOMENTS)
    pairs = [(math.nan, math.nan) if each is None else (each.mean, _number(each.variance)) for each in moments]
    return _ROW.pack(
        found.ended_s,
        found.share_samples,
        found.micro_batches,
        found.steps,
        found.warm_up,
        found.bucket_steps,
        _number(found.overlapped_s),
        _number(found.last_bucket_s),
        _number(found.generation),
        *(value for pair in pairs for value in pair),
    )


def unpack(member: str, row: bytes) -> Observation:
    """Return the observation that a row was made of."""
    ended_s, share, micro_batches, steps, warm_up, bucket_steps, overlapped_s, last_s, generation, *rest = _ROW.unpack(
        row
    )
    moments = {
        name: None if math.isnan(mean) else MeanVariance(mean=mean, variance=_known(variance))
        for name, mean, variance in zip(_MOMENTS, rest[::2], rest[1::2], strict=True)
    }
    return Observation(
        member=member,
        share_samples=int(share),
        micro_batches=int(micro_batches),
        steps=int(steps),
        ended_s=ended_s,
        warm_up=bool(warm_up),
        bucket_steps=int(bucket_steps),
        overlapped_s=_known(overlapped_s),
        last_bucket_s=_known(last_s),
        generation=None if math.isnan(generation) else int(generation),
        **moments,
    )


class PackedObservations(Mapping[_Key, tuple[Observation, ...]], Generic[_Key]):
    """Observations by rank, oldest first; all of a rank have the same member.

    Args:
        rows: by rank, its member and its rows.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Mapping[_Key, tuple[str, tuple[bytes, ...]]] | None = None) -> None:
        self._rows = dict(rows or {})

    def __getitem__(self, key: _Key) -> tuple[Observation, ...]:
        member, rows = self._rows[key]
        return tuple(unpack(member, row) for row in rows)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def since(self, key: _Key, ended_s: float) -> tuple[Observation, ...]:
        """Return a rank's observations that ended at this time or later, or else its newest one."""
        member, rows = self._rows[key]
        found = [row for row in rows if _ENDED.unpack_from(row)[0] >= ended_s] or rows[-1:]
        return tuple(unpack(member, row) for row in found)

    def put(self, key: _Key, observations: Sequence[Observation]) -> None:
        """Keep a rank's observations, at least one, instead of those before."""
        self._rows[key] = (observations[0].member, tuple(map(pack, observations)))

    def discard(self, key: _Key) -> None:
        """Forget a rank's observations."""
        self._rows.pop(key, None)

    def with_others(self, others: Mapping[_Key, Sequence[Observation]]) -> PackedObservations[_Key]:
        """Return a copy that also has others; later changes here do not change it."""
        found = PackedObservations(self._rows)
        for key, observations in others.items():
            found.put(key, observations)
        return found


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
