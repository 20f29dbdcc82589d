"""The operator's two clocks as one value, so that a test replaces both in one place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time of this process and time of day.

    Attributes:
        monotonic: seconds that never go back, for durations.
        wall: seconds since the epoch, for timestamps.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
