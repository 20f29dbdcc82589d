"""How large a micro-batch may be: declared, seen in peak memory, and taught by running out of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

USABLE_PART = 0.92
"""Of a device's memory: the allocator fragments, and libraries take their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The peak memory of steps with this largest micro-batch, and whether they ran out of it.

    Attributes:
        micro_batch_samples: samples of the largest micro-batch.
        peak_bytes: highest allocation; ``None`` when it is not known.
        ran_out: an out-of-memory error ended such a step.
    """

    micro_batch_samples: int
    peak_bytes: float | None = None
    ran_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCap:
    """The largest micro-batch that is thought to fit, ``None`` for no limit, and why."""

    samples: int | None
    reason: str


def micro_batch_cap(
    peaks: Sequence[MemoryPeak], *, declared: int | None = None, memory_bytes: float | None = None
) -> MicroBatchCap:
    """Return the least of what is declared, half of what ran out of memory, and what peak memory leaves room for.

    Peak memory is a line in the micro-batch, ``base + slope n``: activations grow with it, weights and optimizer state
    do not. The line is drawn through the two largest sizes seen; one size tells nothing about larger ones.

    Args:
        peaks: what was seen, in any order; what cannot be true is left out.
        declared: the user's own limit in samples.
        memory_bytes: the device's memory; without it peaks tell nothing.
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
            # What has run is known to fit, whatever the line says.
            caps.append(
                (max(large, room), f"{slope / 2**20:.3g} MiB a sample on {large_bytes / 2**30:.3g} GiB for {large}")
            )
    if not caps:
        return MicroBatchCap(samples=None, reason="nothing is known about its memory")
    samples, reason = min(caps)
    return MicroBatchCap(samples=samples, reason=reason)
