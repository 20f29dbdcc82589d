"""Seconds that a computation takes when it is repeated for long, from a few runs of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Moment:
    """Readings of two clocks, or the time between two such readings, in seconds.

    Attributes:
        wall_s: of time.
        processor_s: of the processors that this process has used.
    """

    wall_s: float
    processor_s: float

    def until(self, other: Moment) -> Moment:
        """Return the time between two moments."""
        return Moment(other.wall_s - self.wall_s, other.processor_s - self.processor_s)


def clocks(
    device: torch.device, wall: Clock = time.perf_counter, processor: Clock = time.process_time
) -> Callable[[], Moment]:
    """Return a function that reads both clocks when the device has finished its work."""

    def now() -> Moment:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return Moment(wall(), processor())

    return now


def lasting_s(runs: Sequence[Moment], processors: float) -> float:
    """Return the seconds of a run among many: the median, but no less than its processor time permits.

    Training meets the host's other programs, too, so the least of the runs would promise too much: on a virtual machine
    with two processors, the mean of many passes took 1.2 times the shortest one. A single run may end before a limit of
    processors is felt.

    Args:
        runs: at least one.
        processors: that may be used for long; infinity for no limit. See ``usable_processors``.
    """
    return max(median(run.wall_s for run in runs), median(run.processor_s for run in runs) / processors)
