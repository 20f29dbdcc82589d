"""Buckets on their way, and the times of their transfers, from timestamps that are recorded in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain.exchange.interface import Bucket
from heterotrain.exchange.timeline import ReductionTimestamps, Timeline, Timestamp
from heterotrain.network.sums import Reduction


@dataclass(slots=True, eq=False)
class Transfer:
    """One bucket's way in one step after the other.

    Attributes:
        bucket: the bucket.
        work: its sum; ``None`` before it has been started, and when it has been waited for.
        timed: its sum after the wait, where that knows how long it took.
        started: when it began.
        done: when it ended; ``None`` until that is recorded.
    """

    bucket: Bucket
    work: Reduction | None = None
    timed: Reduction | None = None
    started: Timestamp | None = None
    done: Timestamp | None = None


def transfers_s(
    transfers: Sequence[Transfer], timestamps: ReductionTimestamps, timeline: Timeline
) -> tuple[float, ...]:
    """Return each bucket's transfer seconds; empty if nothing was exchanged or the device has not finished yet.

    Time in which an earlier bucket still occupied the network does not count.

    Args:
        transfers: in the order in which they were started.
        timestamps: those of the same step.
        timeline: timeline of the device that holds them.
    """
    if timestamps.began is None or timestamps.waited is None:
        return ()
    seconds, free_s = [], 0.0
    for transfer in transfers:
        done = transfer.done  # may be recorded only after the wait has returned
        if transfer.started is None or (done is not None and not timeline.is_past(done)):
            return ()
        done_s = timeline.seconds(timestamps.began, timestamps.waited if done is None else done)
        seconds.append(max(0.0, done_s - max(timeline.seconds(timestamps.began, transfer.started), free_s)))
        free_s = max(free_s, done_s)
    return tuple(seconds)
