"""How many processors a rank may use for long, which a short measurement does not show.

The kernel gives a container its whole time for a period at once, by default each 100 ms. What is over sooner never has
to wait, and so seems as fast as without a limit. Training computes throughout and does wait.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

GROUPS = Path("/sys/fs/cgroup")
"""Where the kernel shows the limits of this container."""


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
