"""Measures the phases of one attempt at a step, on the device's timeline."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum, auto

from heterotrain.exchange.timeline import ReductionTimestamps, Timeline, Timestamp
from heterotrain.telemetry.report import StepTimes


class Phase(StrEnum):
    """The device's phases in a step. Communication hidden by backward is in none of them; ``SYNC`` is pure waiting."""

    LOAD = auto()
    FORWARD = auto()
    BACKWARD = auto()
    SYNC = auto()
    UPDATE = auto()


_NOTHING = dict.fromkeys(Phase, 0.0)


class Clock:
    """The phases of one attempt, recorded while it runs and read after the device has passed them.

    Attributes:
        timeline: the device's timeline.
        now: returns the present time on it.
        last_backward: the end of the backward pass in which buckets started; ``None`` without one.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.now = timeline, timeline.now
        self.last_backward: Timestamp | None = None
        self._spans: list[tuple[Phase, Timestamp, Timestamp]] = []
        self._seconds: dict[Phase, float] = {}

    def spent(self, phase: Phase, since: Timestamp) -> Timestamp:
        """Record that the device was busy with ``phase`` from ``since`` until now; return the present time."""
        moment = self.now()
        self._spans.append((phase, since, moment))
        return moment

    def took(self, seconds: Mapping[Phase, float]) -> None:
        """Record seconds that were measured elsewhere."""
        for phase, value in seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + value

    def read(self, timestamps: ReductionTimestamps, *, step_s: float) -> StepTimes | None:
        """Return the seconds of each phase; ``None`` before the device has finished all of them.

        Args:
            timestamps: the reducer's timestamps of the same attempt.
            step_s: seconds from the previous commit to this one.
        """
        if self._spans and not self.timeline.is_past(self._spans[-1][2]):
            return None
        total, seconds = _NOTHING | self._seconds, self.timeline.seconds
        for phase, began, ended in self._spans:
            total[phase] += seconds(began, ended)
        return StepTimes(
            load_s=total[Phase.LOAD], forward_s=total[Phase.FORWARD], backward_s=total[Phase.BACKWARD],
            sync_s=total[Phase.SYNC], update_s=total[Phase.UPDATE], step_s=step_s,
            first_bucket_ratio=self._first_bucket_ratio(timestamps),
        )  # fmt: skip

    def _first_bucket_ratio(self, timestamps: ReductionTimestamps) -> float | None:
        """Return gamma: the fraction of the last backward pass after which the first bucket is complete."""
        if timestamps.began is None or timestamps.first_bucket is None or self.last_backward is None:
            return None
        length_s = self.timeline.seconds(timestamps.began, self.last_backward)
        return (
            min(1.0, self.timeline.seconds(timestamps.began, timestamps.first_bucket) / length_s)
            if length_s > 0
            else None
        )
