"""Moments on the timeline of the device that computes.

A CUDA device runs behind the process that feeds it: the host's clock around a call shows how long queueing took, not how
long computing did. A moment there is an event in the current stream. The device notes the time when it gets there, nobody
waits for it, and whoever wants to know asks later.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeAlias

import torch

Timestamp: TypeAlias = float | torch.cuda.Event


class Timeline(Protocol):
    """A device's own time."""

    def now(self) -> Timestamp:
        """Return the moment at which the device has done what was queued up to here."""

    def is_past(self, moment: Timestamp) -> bool:
        """Return whether the device has got there; never waits."""

    def seconds(self, earlier: Timestamp, later: Timestamp) -> float:
        """Return the seconds between two moments that are past."""


class HostTimeline:
    """Plain processors: a call returns when its work is done, so the host's clock is the device's."""

    def now(self) -> float:
        """Return ``time.perf_counter``."""
        return time.perf_counter()

    def is_past(self, _moment: Any) -> bool:
        """Return true."""
        return True

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the difference."""
        return float(later - earlier)


class CudaTimeline:
    """Events of one CUDA device, recorded in whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """Return an event recorded in the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, moment: Any) -> bool:
        """Return whether the event was reached."""
        return bool(moment.query())

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two reached events; CUDA resolves half a microsecond."""
        return float(earlier.elapsed_time(later)) / 1e3


def timeline_of(device: torch.device) -> Timeline:
    """Return the timeline of a device."""
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()
