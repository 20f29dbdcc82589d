"""The speed of one member as it outlives its job: a line, and the shares at which it was seen.

The next job of the same program takes it for the steps of a member that has left. So it is trusted as such steps are:
near the shares that were seen, as far as so many steps show the line, and until members of its own are measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember

from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.fit import fit_member
from heterotrain_planner.perf.model import FitQuality, MemberModel, compute_s
from heterotrain_planner.planning.evidence import TRUSTED_GROWTH

MOST_SHAPES = 8
"""Shares that are kept: the smallest, the largest, and those of most steps."""
LEAST_STEPS = 10
"""Steps at the present speed below which nothing is kept."""
MOST_STEPS = 300
"""Steps that count at one share: other nodes of a pool differ by more than further steps would average out."""
_STEPS, _VARIATION = 20, 0.1
"""Steps at each share, and their variation, where these are not known."""
MOST_RATIO = 1.5
"""Measured over kept seconds, or the inverse, from which on a kept speed is not that of this job."""


class SharesSeen(NamedTuple):
    """Steps at one share."""

    share_samples: int
    micro_batches: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSpeed:
    """A member's time model, as far as ``seen`` shows it.

    Attributes:
        compute: the line, exact at the newest share.
        variation: standard deviation of a step relative to its mean.
        seen: at least one share, each with its micro-batches once.
    """

    compute: ComputeTime
    variation: float
    seen: tuple[SharesSeen, ...]

    def seconds(self, share_samples: int, micro_batches: int = 1) -> float:
        """Return the own seconds of a step."""
        return compute_s(self.compute, share_samples, micro_batches=micro_batches)


def speed_near(compute: ComputeTime, share_samples: int) -> KeptSpeed:
    """Return the speed of a line of which only the share is known near which it was measured."""
    shares = sorted({max(1, share_samples // 2), max(2, share_samples)})
    return KeptSpeed(compute=compute, variation=_VARIATION, seen=tuple(SharesSeen(each, 1, _STEPS) for each in shares))


def kept_speed(model: MemberModel, line: ComputeTime | None, observations: Sequence[Observation]) -> KeptSpeed | None:
    """Return what is kept of a member by its line at the newest share; ``None`` while its speed is not known."""
    if line is None or model.drifted or model.quality is FitQuality.DEGENERATE:
        return None
    left, steps = model.steps_at_speed, Counter[tuple[int, int]]()
    for each in reversed(observations):
        if left <= 0:
            break
        if each.share_samples and not each.warm_up:
            steps[each.share_samples, each.micro_batches] += each.steps
            left -= each.steps
    if steps.total() < LEAST_STEPS:
        return None
    chosen = dict.fromkeys([min(steps), max(steps), *(shape for shape, _ in steps.most_common())])
    seen = sorted(SharesSeen(*shape, min(steps[shape], MOST_STEPS)) for shape in list(chosen)[:MOST_SHAPES])
    return KeptSpeed(compute=line, variation=model.variation, seen=tuple(seen))


def middle_speed(kept: Iterable[KeptSpeed]) -> KeptSpeed | None:
    """Return the middle one by speed (the slower of two) among those of a pool's members; ``None`` without any."""
    ordered = sorted(kept, key=lambda each: each.compute.per_sample_s + each.compute.backward_per_sample_s)
    return ordered[len(ordered) // 2] if ordered else None


def as_observed(kept: KeptSpeed, member: str) -> tuple[Observation, ...]:
    """Return observations of a member of this speed: a fit to them yields the same line, known as well."""
    c = kept.compute

    def observation(share: int, micro_batches: int, steps: int) -> Observation:
        before_s = c.per_sample_s * share + c.fixed_s * micro_batches
        backward_s = c.backward_per_sample_s * share + c.backward_fixed_s * micro_batches
        own_s = before_s + backward_s + c.update_s
        return Observation(
            member=member,
            share_samples=share,
            micro_batches=micro_batches,
            steps=steps,
            ended_s=0.0,
            load=MeanVariance(mean=0.0),
            forward=MeanVariance(mean=before_s),
            backward=MeanVariance(mean=backward_s),
            update=MeanVariance(mean=c.update_s),
            compute=MeanVariance(mean=own_s, variance=(kept.variation * own_s) ** 2 if steps > 1 else None),
        )

    return tuple(observation(*each) for each in kept.seen)


def as_model(kept: KeptSpeed, member: str) -> MemberModel:
    """Return the model of a member of this speed."""
    return fit_member(as_observed(kept, member))


def holds_for(batch_samples: int, members: Sequence[KeptSpeed]) -> bool:
    """Return whether these members share the batch near the shares that were seen of each of them."""
    found = balance(batch_samples, [SplitMember(compute=each.compute) for each in members])
    if not members or not isinstance(found, Split):
        return False
    near = (
        min(each.seen)[0] <= TRUSTED_GROWTH * share and share <= TRUSTED_GROWTH * max(each.seen)[0]
        for each, share in zip(members, found.shares, strict=True)
    )
    return all(near)


def is_refuted(kept: KeptSpeed, observations: Sequence[Observation]) -> bool:
    """Return whether a member's newest steps take far longer or shorter than the kept speed says."""
    steps, ratio = 0, 0.0
    for each in reversed(observations):
        expected_s = kept.seconds(each.share_samples, each.micro_batches)
        if steps >= LEAST_STEPS:
            break
        if each.compute is not None and not each.warm_up and expected_s > 0:
            steps, ratio = steps + each.steps, ratio + each.steps * each.compute.mean / expected_s
    return steps >= LEAST_STEPS and abs(math.log(max(ratio / steps, 1e-9))) > math.log(MOST_RATIO)
