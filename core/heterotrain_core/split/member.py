"""One member as input of the split: the time of each share, and the allowed shares."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from heterotrain_core.contract.plan import ComputeTime


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTime:
    """Measured step times: linear between the points, flat below the first, no share beyond the last.

    Need not be convex or monotone. There is no separate backward part, so communication cannot overlap with it.

    Attributes:
        points: (samples, seconds), by growing samples; at least one.
    """

    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMember:
    """One rank, or anything else with a time curve such as a whole pipeline, as input of the split.

    Attributes:
        compute: own seconds for a share. A share of 0 takes no micro-batch, so only ``ComputeTime.update_s`` is left.
        floor_samples: least share; 0 allows an empty share.
        cap_samples: largest share, whatever the micro-batches; ``None`` when there is no limit.
        micro_cap_samples: largest micro-batch; a larger share is accumulated over ``ceil(share / micro_cap)``
            micro-batches of nearly equal size. ``None`` when everything fits at once.
        granularity_samples: shares are multiples of it; floor and cap are rounded inwards.
    """

    compute: ComputeTime | TableTime
    floor_samples: int = 1
    cap_samples: int | None = None
    micro_cap_samples: int | None = None
    granularity_samples: int = 1


def member_problem(member: SplitMember) -> str | None:
    """Return in one clause why the member is unusable, ``None`` when it is sound."""
    if member.floor_samples < 0:
        return f"has a negative floor ({member.floor_samples})"
    if member.granularity_samples < 1:
        return f"has a granularity of {member.granularity_samples}, which has to be at least 1"
    if member.micro_cap_samples is not None and member.micro_cap_samples < 1:
        return f"has a micro-batch cap of {member.micro_cap_samples}, which has to be at least 1"
    compute = member.compute
    if isinstance(compute, TableTime):
        if not compute.points:
            return "has an empty table"
        samples = [point[0] for point in compute.points]
        if samples[0] < 0 or any(b <= a for a, b in itertools.pairwise(samples)):
            return "has a table whose samples do not grow"
        sound = all(math.isfinite(seconds) and seconds > 0 for _, seconds in compute.points)
        return None if sound else "has a table with a time that is not positive"
    parts = (
        compute.per_sample_s,
        compute.fixed_s,
        compute.backward_per_sample_s,
        compute.backward_fixed_s,
        compute.update_s,
    )
    if not all(math.isfinite(x) and x >= 0 for x in parts):
        return "has a time model with a negative or infinite part"
    return None if any(x > 0 for x in parts) else "has a time model without any time"


def micro_batch_count(share_samples: int, micro_cap_samples: int | None) -> int:
    """Return the number of micro-batches of a share: none for an empty share, one while it fits."""
    if share_samples <= 0:
        return 0
    return 1 if micro_cap_samples is None else -(-share_samples // micro_cap_samples)
