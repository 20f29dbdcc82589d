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
class CurveTime:
    """A fitted curve of micro-batch seconds: straight between the points, flat outside of them.

    Measured phases are the same part of the time at all sizes. A further micro-batch never makes a step shorter here,
    whatever the points say: such a fall is mostly an error of the fit, and shares would jump to it.

    Attributes:
        points: (samples of a micro-batch, seconds), by growing samples; seconds never fall. At least one.
        backward_part: part of the seconds that is backward, which hides the exchange.
        update_s: seconds of the update, once a step.
    """

    points: tuple[tuple[float, float], ...]
    backward_part: float
    update_s: float = 0.0


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

    compute: ComputeTime | TableTime | CurveTime
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
    if isinstance(compute, CurveTime):
        return _curve_problem(compute)
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


def _curve_problem(curve: CurveTime) -> str | None:
    seconds = [point[1] for point in curve.points]
    if not seconds:
        return "has an empty time curve"
    if any(b[0] <= a[0] for a, b in itertools.pairwise(curve.points)):
        return "has a time curve whose samples do not grow"
    if any(b < a for a, b in itertools.pairwise(seconds)) or not seconds[0] > 0 or not math.isfinite(seconds[-1]):
        return "has a time curve that falls, or with a time that is not positive"
    sound = 0 <= curve.backward_part <= 1 and 0 <= curve.update_s < math.inf
    return None if sound else "has a time curve whose backward part is not in [0, 1], or a negative update"


def micro_batch_count(share_samples: int, micro_cap_samples: int | None) -> int:
    """Return the number of micro-batches of a share: none for an empty share, one while it fits."""
    if share_samples <= 0:
        return 0
    return 1 if micro_cap_samples is None else -(-share_samples // micro_cap_samples)
