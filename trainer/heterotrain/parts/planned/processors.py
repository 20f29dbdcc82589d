"""Processors that a rank may use for long, and the time of a computation that is repeated for long.

The kernel gives a container its whole time for a period at once, by default each 100 ms. What is over sooner never has
to wait, and so seems as fast as without a limit. Training computes throughout and does wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

GROUPS = Path("/sys/fs/cgroup")
"""Where the kernel shows the limits of this container."""
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


def usable_processors(device: torch.device, *, ranks: int, groups: Path = GROUPS) -> float:
    """Return the processors that the container's limit leaves to a rank's computation; infinity without a limit.

    Args:
        device: of this rank; an accelerator does not compute on processors.
        ranks: processes that share the container's limit.
        groups: folder of the control groups, of version 2 or 1.
    """
    if device.type != "cpu":
        return math.inf
    return _quota(groups) / ranks


def _quota(groups: Path) -> float:
    for read in (_version_2, _version_1):
        try:
            quota, period = read(groups)
        except (OSError, ValueError):  # the other version, no limit, or not Linux
            continue
        if quota > 0 and period > 0:  # version 1 has -1 for no limit
            return quota / period
    return math.inf


def _version_2(groups: Path) -> tuple[int, int]:
    quota, period = (groups / "cpu.max").read_text().split()
    return int(quota), int(period)  # "max" for no limit


def _version_1(groups: Path) -> tuple[int, int]:
    quota, period = ((groups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota), int(period)
