"""Estimates whether a checkpoint can be written in the rest of a grace period, from the speed of earlier writes."""

from __future__ import annotations

from dataclasses import dataclass

SLACK = 1.5
"""Safety factor on the write time: stores are slower when many pods leave at once."""
EXIT_RESERVE_S = 1.0
"""Seconds reserved for the termination message and the end of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteEstimate:
    """The estimate of one write.

    Attributes:
        needed_s: expected duration in seconds; ``None`` before the first measured write.
        fits: whether the write fits into the remaining time; a write of unknown speed is assumed to fit.
        reason: explanation for log messages.
    """

    needed_s: float | None
    fits: bool
    reason: str


def estimate_write(*, size_bytes: int, speed_bytes_per_s: float | None, left_s: float) -> WriteEstimate:
    """Estimate a write of ``size_bytes`` by this rank that has to be complete in ``left_s`` seconds."""
    left_s = max(0.0, left_s - EXIT_RESERVE_S)
    size = f"{size_bytes / 1e6:.0f} MB"
    if speed_bytes_per_s is None or speed_bytes_per_s <= 0:
        return WriteEstimate(needed_s=None, fits=True, reason=f"{size} must be written within {left_s:.0f} s")
    needed_s = SLACK * size_bytes / speed_bytes_per_s
    fits = needed_s <= left_s
    reason = (
        f"{size} need about {needed_s:.1f} s at the {speed_bytes_per_s / 1e6:.0f} MB/s of the last write, and "
        f"{left_s:.0f} s are left"
    )
    return WriteEstimate(needed_s=needed_s, fits=fits, reason=reason)


def must_start_now(estimate: WriteEstimate, *, left_s: float, step_left_s: float) -> bool:
    """Return whether a write would be too late after the running step but fits now.

    Args:
        estimate: the estimate for ``left_s``.
        left_s: seconds until the process is killed.
        step_left_s: seconds until the running step is likely to be committed.
    """
    if estimate.needed_s is None:
        return step_left_s > left_s / 2
    return estimate.fits and left_s - EXIT_RESERVE_S - step_left_s < estimate.needed_s
