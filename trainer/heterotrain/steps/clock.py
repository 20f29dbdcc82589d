"""Where an attempt's time goes, on the device's timeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto

from heterotrain.numerics.timeline import Timeline, Timestamp
from heterotrain.numerics.transfers import ReductionTimestamps
from heterotrain.telemetry.report import StepTimes


class Phase(StrEnum):
    """What a device does in a step. Communication that backward hides belongs to no phase; ``SYNC`` is waiting only."""

    LOAD = auto()
    FORWARD = auto()
    BACKWARD = auto()
    SYNC = auto()
    UPDATE = auto()


@dataclass(slots=True)
class Clock:
    """Phases of one attempt, noted while it runs and read when the device has come that far.

    Attributes:
        timeline: the device's.
        last_backward: the end of the backward pass in which buckets started, ``None`` without one.
    """

    timeline: Timeline
    last_backward: Timestamp | None = None
    _spans: list[tuple[Phase, Timestamp, Timestamp]] = field(default_factory=list)

    def now(self) -> Timestamp:
        """Return this moment."""
        return self.timeline.now()

    def spent(self, phase: Phase, since: Timestamp) -> Timestamp:
        """Note that the device was busy with ``phase`` from ``since`` to now; return now."""
        moment = self.timeline.now()
        self._spans.append((phase, since, moment))
        return moment

    def is_over(self) -> bool:
        """Return whether the device has done all of it."""
        return all(self.timeline.is_past(ended) for _, _, ended in self._spans[-1:])

    def read(self, timestamps: ReductionTimestamps, *, step_s: float) -> StepTimes:
        """Return the phases' seconds; only when ``is_over``.

        Args:
            timestamps: the reducer's moments of the same attempt.
            step_s: seconds from the commit before to this one's.
        """
        total = dict.fromkeys(Phase, 0.0)
        for phase, began, ended in self._spans:
            total[phase] += self.timeline.seconds(began, ended)
        return StepTimes(
            load_s=total[Phase.LOAD], forward_s=total[Phase.FORWARD], backward_s=total[Phase.BACKWARD],
            sync_s=total[Phase.SYNC], update_s=total[Phase.UPDATE], step_s=step_s,
            first_bucket_ratio=self._first_bucket_ratio(timestamps),
        )  # fmt: skip

    def _first_bucket_ratio(self, timestamps: ReductionTimestamps) -> float | None:
        """Return gamma: the part of the last backward pass after which the first bucket is complete."""
        if timestamps.began is None or timestamps.first_bucket is None or self.last_backward is None:
            return None
        length_s = self.timeline.seconds(timestamps.began, self.last_backward)
        return (
            min(1.0, self.timeline.seconds(timestamps.began, timestamps.first_bucket) / length_s)
            if length_s > 0
            else None
        )
