"""Limits micro-batches: by declaration, by peak memory, and by out-of-memory errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

USABLE_PART = 0.92
"""Usable part of a device's memory: the allocator fragments, and libraries need some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """Peak memory of steps with this largest micro-batch, and whether they ran out of memory.

    Attributes:
        micro_batch_samples: samples of the largest micro-batch.
        peak_bytes: highest allocation; ``None`` when it is not known.
        ran_out: whether an out-of-memory error ended such a step.
    """

    micro_batch_samples: int
    peak_bytes: float | None = None
    ran_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCap:
    """The largest micro-batch expected to fit, ``None`` for no limit, and the reason."""

    samples: int | None
    reason: str


def micro_batch_cap(
    peaks: Sequence[MemoryPeak], *, declared: int | None = None, memory_bytes: float | None = None
) -> MicroBatchCap:
    """Return the least of the declared limit, half of a size that ran out of memory, and the fit of peak memory.

    Peak memory is a line in the micro-batch, ``base + slope n``: activations grow with it, weights and optimizer state
    do not. The line goes through the two largest observed sizes; one size alone does not show the slope.

    Args:
        peaks: observations, in any order; implausible ones are left out.
        declared: the user's own limit in samples.
        memory_bytes: the device's memory; without it, peaks do not give a limit.
    """
    caps = [] if declared is None else [(max(1, declared), f"{declared} samples are declared to fit")]
    failed = [peak.micro_batch_samples for peak in peaks if peak.ran_out and peak.micro_batch_samples > 0]
    if failed:
        half = max(1, min(failed) // 2)
        caps.append((half, f"{min(failed)} samples ran out of memory, so half of it"))
    seen: dict[int, float] = {}
    for peak in peaks:
        size, used = peak.micro_batch_samples, peak.peak_bytes
        if used is not None and math.isfinite(used) and used > 0 and size > 0 and not peak.ran_out:
            seen[size] = max(used, seen.get(size, 0.0))
    if memory_bytes is not None and len(seen) > 1:
        (small, small_bytes), (large, large_bytes) = sorted(seen.items())[-2:]
        slope = (large_bytes - small_bytes) / (large - small)
        if slope > 0:
            room = large + math.floor((USABLE_PART * memory_bytes - large_bytes) / slope)
            # Sizes that have run do fit, whatever the line predicts.
            caps.append(
                (
                    max(large, room),
                    f"{large} samples take {large_bytes / 2**30:.3g} GiB, each further one {slope / 2**20:.3g} MiB",
                )
            )
    if not caps:
        return MicroBatchCap(samples=None, reason="no limit is known for its memory")
    samples, reason = min(caps)
    return MicroBatchCap(samples=samples, reason=reason)
