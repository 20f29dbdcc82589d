"""Timestamps on the timeline of the computing device.

A CUDA device runs behind the process that queues its work, so the host's clock around a call measures queueing, not
computing. A timestamp there is an event in the current stream: the device records the time when it reaches the event,
the host does not wait for it, and the time is read later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

Timestamp: TypeAlias = float | torch.cuda.Event


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


class Timeline(Protocol):
    """A device's own time."""

    def now(self) -> Timestamp:
        """Return the time at which the device finishes the work queued so far."""

    def is_past(self, timestamp: Timestamp) -> bool:
        """Return whether the device has reached the timestamp; never waits."""

    def seconds(self, earlier: Timestamp, later: Timestamp) -> float:
        """Return the seconds between two timestamps that are past."""


class HostTimeline:
    """Timeline of a CPU: a call returns when its work is done, so the host's clock is the device's."""

    now = staticmethod(time.perf_counter)
    seconds: Callable[[Any, Any], float] = staticmethod(float.__rsub__)  # later - earlier; no Python runs for these
    is_past: Callable[[Any], bool] = staticmethod(math.isfinite)  # each one is


class CudaTimeline:
    """Timeline of one CUDA device: events recorded in its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """Return an event recorded in the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, timestamp: Any) -> bool:
        """Return whether the device has reached the event."""
        return bool(timestamp.query())

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two reached events; CUDA resolves half a microsecond."""
        return float(earlier.elapsed_time(later)) / 1e3


def timeline_of(device: torch.device) -> Timeline:
    """Return the timeline of a device."""
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()
