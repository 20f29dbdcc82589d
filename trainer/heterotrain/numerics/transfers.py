"""How long buckets were on their way, from moments that are noted anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain.numerics.buckets import Bucket
from heterotrain.numerics.timeline import Moment, Timeline


@dataclass(slots=True)
class Timing:
    """Moments of one step's last backward pass; ``None`` while they have not come.

    Attributes:
        began: its start.
        first_bucket: when the first bucket was complete.
        waited: when the last bucket was there, summed over all ranks.
    """

    began: Moment | None = None
    first_bucket: Moment | None = None
    waited: Moment | None = None


def transfers_s(buckets: Sequence[Bucket], timing: Timing, timeline: Timeline) -> tuple[float, ...]:
    """Return each bucket's transfer seconds, nothing when nothing was exchanged or the device has not come that far.

    Time in which an earlier bucket still used the wire is not a bucket's own.

    Args:
        buckets: in the order in which they were reduced.
        timing: of the step in which they were.
        timeline: of the device that holds them.
    """
    if timing.began is None or timing.waited is None:
        return ()
    seconds, free_s = [], 0.0
    for bucket in buckets:
        done = bucket.done  # the note may come after the wait returned
        if bucket.started is None or (done is not None and not timeline.is_past(done)):
            return ()
        done_s = timeline.seconds(timing.began, timing.waited if done is None else done)
        seconds.append(max(0.0, done_s - max(timeline.seconds(timing.began, bucket.started), free_s)))
        free_s = max(free_s, done_s)
    return tuple(seconds)
