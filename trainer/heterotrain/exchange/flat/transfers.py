"""Transfer times of gradient buckets, computed from timestamps that are recorded in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain.exchange.flat.buckets import Bucket
from heterotrain.exchange.timeline import Timeline, Timestamp


@dataclass(slots=True)
class ReductionTimestamps:
    """Timestamps of one step's last backward pass; ``None`` before they are recorded.

    Attributes:
        began: start of the pass.
        first_bucket: when the first bucket was complete.
        waited: when the last bucket had arrived, summed over all ranks.
    """

    began: Timestamp | None = None
    first_bucket: Timestamp | None = None
    waited: Timestamp | None = None


def transfers_s(buckets: Sequence[Bucket], timestamps: ReductionTimestamps, timeline: Timeline) -> tuple[float, ...]:
    """Return each bucket's transfer seconds; empty if nothing was exchanged or the device has not finished yet.

    Time in which an earlier bucket still occupied the network does not count.

    Args:
        buckets: in the order in which they were reduced.
        timestamps: those of the same step.
        timeline: timeline of the device that holds them.
    """
    if timestamps.began is None or timestamps.waited is None:
        return ()
    seconds, free_s = [], 0.0
    for bucket in buckets:
        done = bucket.done  # may be recorded only after the wait has returned
        if bucket.started is None or (done is not None and not timeline.is_past(done)):
            return ()
        done_s = timeline.seconds(timestamps.began, timestamps.waited if done is None else done)
        seconds.append(max(0.0, done_s - max(timeline.seconds(timestamps.began, bucket.started), free_s)))
        free_s = max(free_s, done_s)
    return tuple(seconds)
