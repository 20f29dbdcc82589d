"""Exchange times at other numbers of members, from those that a job was seen with.

A ring all-reduce of D bytes takes ``2 (n - 1)`` rounds, and each of them a latency and the transfer of ``D / n`` bytes
(Thakur, Rabenseifner and Gropp 2005):

    T(n) = 2 (n - 1) latency + 2 (n - 1) / n transfer

A round is as slow as its slowest link. So members within one worker and members across workers have coefficients of
their own, and nothing else about the network matters. ``T / 2 (n - 1)`` is a line in ``1 / n``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from heterotrain_core.contract.keys import MOST_SIZES
from heterotrain_core.contract.plan import CommunicationTime
from numpy.typing import NDArray

from heterotrain_planner.perf.counters import LONGEST_STEP_S, SHORTEST_STEP_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MOVED_RATIO = 0.03
"""Relative change of a measurement from which it replaces the one before: every change values the job again."""
_ERROR_RATIO = 0.03
"""Standard error of a measurement, relative: the network of that time was not quite that of today."""
_STEP_ERROR_RATIO = 0.3
"""Relative standard deviation of one exchange, assumed."""

_DEVIATIONS = 2.0
"""Standard errors below which a latency counts as 0: it decides about numbers of members far beyond those seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSeen:
    """The exchange as measured with one number of members.

    Attributes:
        members: among which it took place, at least 2.
        across: whether they belonged to several workers; otherwise no network was used.
        seconds: of all buckets (T_o + T_u).
        steps: timed exchanges, at least 1.
    """

    members: int
    across: bool
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredExchange:
    """The exchange of a job as measured, and what follows for other members. Nothing else scales exchange times.

    Attributes:
        communication: T_o, T_u and gamma among ``members``.
        members: in its measurement; below 2, nothing follows for other numbers, and it counts for all of them.
        seen: all numbers of members with which the exchange was measured, the newest last; may be empty.
    """

    communication: CommunicationTime = field(default_factory=CommunicationTime)
    members: int = 0
    seen: tuple[ExchangeSeen, ...] = ()

    def scale(self, members_O: Ints, across_O: NDArray[np.bool_]) -> Floats:
        """Return the factor on ``communication`` for other numbers of members; 0 for a single one.

        Args:
            members_O: numbers of members.
            across_O: whether they belong to several workers.
        """
        known_s = self.communication.overlapped_s + self.communication.last_bucket_s
        if self.seen and known_s >= SHORTEST_STEP_S:
            return exchange_s(self.seen, members_O, across_O) / known_s
        if self.members < 2:  # noqa: PLR2004  # a single member exchanges nothing
            return np.where(members_O > 1, 1.0, 0.0)
        only = ExchangeSeen(members=self.members, across=True, seconds=1.0, steps=1)
        return exchange_s((only,), members_O, across_O)

    def measured_among(self, members: int, *, across: bool, steps: int) -> MeasuredExchange:
        """Return the exchange with this as the newest measurement: ``communication`` among so many members."""
        seconds = self.communication.overlapped_s + self.communication.last_bucket_s
        own = ExchangeSeen(members=members, across=across, seconds=seconds, steps=steps)
        return replace(self, members=members, seen=with_seen(self.seen, own))

    def among(self, members: int, *, across: bool) -> CommunicationTime:
        """Return the exchange among another number of members; T_o and T_u keep their ratio."""
        if members < 2:  # noqa: PLR2004  # a single member exchanges nothing
            return CommunicationTime()
        factor = float(self.scale(np.array([members]), np.array([across]))[0])
        return replace(
            self.communication,
            overlapped_s=self.communication.overlapped_s * factor,
            last_bucket_s=self.communication.last_bucket_s * factor,
        )


class RingTime(NamedTuple):
    """Coefficients of one round: seconds of latency, and seconds in which one member would send everything."""

    latency_s: float
    transfer_s: float

    def of(self, members_O: Ints) -> Floats:
        """Return the seconds of an all-reduce among these numbers of members, 0 for a single one."""
        rounds_O: Floats = 2.0 * np.maximum(members_O - 1, 0)
        return rounds_O * (self.latency_s + self.transfer_s / np.maximum(members_O, 1))


def with_seen(before: Sequence[ExchangeSeen], new: ExchangeSeen) -> tuple[ExchangeSeen, ...]:
    """Return the measurements with a new one, which comes last; at most ``MOST_SIZES``.

    One of the same members replaces the one before only where it differs, or rests on twice as many exchanges.

    Args:
        before: oldest first, each size once.
        new: of the present members.
    """
    if new.members < 2 or new.steps < 1 or not SHORTEST_STEP_S <= new.seconds <= LONGEST_STEP_S:  # noqa: PLR2004  # one member exchanges nothing
        return tuple(before)  # no exchange, or no measurement
    old = next((each for each in before if (each.members, each.across) == (new.members, new.across)), None)
    alike = old is not None and abs(new.seconds - old.seconds) <= _MOVED_RATIO * old.seconds
    kept = old if old is not None and alike and new.steps < 2 * old.steps else new
    others = [each for each in before if each is not old]
    return (*others, kept)[-MOST_SIZES:]


def exchange_s(seen: Sequence[ExchangeSeen], members_O: Ints, across_O: NDArray[np.bool_]) -> Floats:
    """Return the expected seconds of the exchange among other numbers of members.

    With one size seen, the latency counts as 0, so times grow with ``(n - 1) / n``. Where members were only seen within
    workers or only across, the other case is taken to be like it. Never raises, and never falls with the members.

    Args:
        seen: from ``with_seen``, at least one.
        members_O: numbers of members.
        across_O: whether they belong to several workers.
    """
    newest = seen[-1]
    within = _fit([each for each in seen if not each.across], newest)
    across = _fit([each for each in seen if each.across], newest)
    within_O, across_members_O = (
        ring.of(members_O) if ring is not None else np.zeros(len(members_O))
        for ring in (within or across, across or within)
    )
    return np.where(across_O, across_members_O, within_O)


def _fit(seen: Sequence[ExchangeSeen], newest: ExchangeSeen) -> RingTime | None:
    """Return the ring of these measurements, exact at the newest of all if that is among them; ``None`` without any."""
    if not seen:
        return None
    inverse_K = np.array([1.0 / each.members for each in seen])
    round_K = np.array([each.seconds / (2 * (each.members - 1)) for each in seen])
    error_K = round_K * np.array([math.hypot(_ERROR_RATIO, _STEP_ERROR_RATIO / math.sqrt(each.steps)) for each in seen])
    weight_K = error_K**-2.0
    latency_s = _latency(inverse_K, round_K, weight_K)
    transfer_s = float(weight_K @ (inverse_K * (round_K - latency_s)) / (weight_K @ inverse_K**2))
    ring = RingTime(latency_s, max(0.0, transfer_s))
    if newest not in seen:
        return ring
    ratio = newest.seconds / float(ring.of(np.array([newest.members]))[0])
    return RingTime(ratio * ring.latency_s, ratio * ring.transfer_s)


def _latency(inverse_K: Floats, round_K: Floats, weight_K: Floats) -> float:
    """Return the weighted line's value at 1/n = 0, shrunk by its own error; 0 with one size."""
    whole = float(weight_K.sum())
    centre = float(weight_K @ inverse_K) / whole
    spread = float(weight_K @ (inverse_K - centre) ** 2)
    if len(inverse_K) < 2 or spread <= 0:  # noqa: PLR2004  # one point is no line
        return 0.0
    slope = max(0.0, float(weight_K @ ((inverse_K - centre) * round_K)) / spread)
    found = float(weight_K @ round_K) / whole - slope * centre
    variance = 1.0 / whole + centre**2 / spread
    return found * max(0.0, 1.0 - _DEVIATIONS**2 * variance / found**2) if found > 0 else 0.0
