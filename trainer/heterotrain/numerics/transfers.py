"""How long buckets were on their way, from moments that are noted anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain.numerics.buckets import Bucket
from heterotrain.numerics.timeline import Timeline, Timestamp


@dataclass(slots=True)
class ReductionTimestamps:
    """Moments of one step's last backward pass; ``None`` while they have not come.

    Attributes:
        began: its start.
        first_bucket: when the first bucket was complete.
        waited: when the last bucket was there, summed over all ranks.
    """

    began: Timestamp | None = None
    first_bucket: Timestamp | None = None
    waited: Timestamp | None = None


def transfers_s(buckets: Sequence[Bucket], timestamps: ReductionTimestamps, timeline: Timeline) -> tuple[float, ...]:
    """Return each bucket's transfer seconds, nothing when nothing was exchanged or the device has not come that far.

    Time in which an earlier bucket still used the wire is not a bucket's own.

    Args:
        buckets: in the order in which they were reduced.
        timestamps: of the step in which they were.
        timeline: of the device that holds them.
    """
    if timestamps.began is None or timestamps.waited is None:
        return ()
    seconds, free_s = [], 0.0
    for bucket in buckets:
        done = bucket.done  # the note may come after the wait returned
        if bucket.started is None or (done is not None and not timeline.is_past(done)):
            return ()
        done_s = timeline.seconds(timestamps.began, timestamps.waited if done is None else done)
        seconds.append(max(0.0, done_s - max(timeline.seconds(timestamps.began, bucket.started), free_s)))
        free_s = max(free_s, done_s)
    return tuple(seconds)
