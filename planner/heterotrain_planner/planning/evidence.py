"""Evidence about a job's members, and how far a plan may rely on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.member import CurveTime, SplitMember

from heterotrain_planner.perf.counters import Observation
from heterotrain_planner.perf.model import FitQuality, MemberModel

TRUSTED_GROWTH = 2
"""Factor on its largest observed share that a member may be given: further away, times may curve.

An ok model only promises good predictions at half and twice the typical share. In simulation, a factor of 4 for ok
models made DeepSpeech2 take 7 % longer: where small shares took equally long, a slope of zero attracted samples.
"""
TRUSTED_SHRINKAGE = 4
"""Factor by which a share may fall at once. A line through disturbed steps would leave a member next to nothing."""
UNSURE_GROWTH = 8
"""The same by a pessimistic line, for batches that exceed what all members are trusted with."""
PESSIMISTIC_DEVIATIONS = 2.0
"""Standard errors of its slope by which a pessimistic line is steeper."""

MOST_TABULATED = 10**6
"""Shares of all members that are tabulated at most, about 40 MB; beyond, lines have to do."""
_FAR_SAMPLES = 2.0**40
"""Size at which a curve's last segment, along the line, ends."""
MOST_PROBED_STEPS = 60
"""Steps after which probing ends even if the speed is still unclear: the member is too noisy for probes to help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvidence:
    """One member and its observations.

    Attributes:
        member: its name, as in its observations.
        pool: a member without evidence is taken to be like the others of its pool; empty means no pool.
        observations: oldest first; may be empty or hold unusable values.
        floor_samples, cap_samples, micro_cap_samples, granularity_samples: as in ``split.member.SplitMember``.
    """

    member: str
    pool: str = ""
    observations: tuple[Observation, ...] = ()
    floor_samples: int = 1
    cap_samples: int | None = None
    micro_cap_samples: int | None = None
    granularity_samples: int = 1


def settled(model: MemberModel) -> bool:
    """Return whether varying the share would teach nothing more about the member."""
    return not model.drifted and (model.quality is FitQuality.OK or model.pooled or model.steps >= MOST_PROBED_STEPS)


def split_member(evidence: MemberEvidence, compute: ComputeTime) -> SplitMember:
    """Return the member as input of the split."""
    return SplitMember(
        compute=compute,
        floor_samples=evidence.floor_samples,
        cap_samples=evidence.cap_samples,
        micro_cap_samples=evidence.micro_cap_samples,
        granularity_samples=evidence.granularity_samples,
    )


def cautious(member: SplitMember, model: MemberModel, even_samples: int) -> SplitMember:
    """Return the member with a cap near its observed shares.

    A slope observed where fixed costs dominate may be zero within its error, and would attract any number of samples.

    Args:
        member: with the user's limits.
        model: its fitted model.
        even_samples: its share if all members were alike; this much is always allowed.
    """
    return _capped(member, max(TRUSTED_GROWTH * model.largest_share_samples, even_samples))


def pessimistic(member: SplitMember, model: MemberModel) -> SplitMember:
    """Return the member with a steeper line and a cap far beyond its observed shares.

    The line passes through the fitted time at a typical observed size. Its slope is ``PESSIMISTIC_DEVIATIONS`` standard
    errors above the fitted one, but no sample takes longer than it does at that size: a fixed part is never negative.
    So shares beyond the trusted ones are worth what they are worth at least, and a batch that pays by this line pays.

    Args:
        member: with the user's limits.
        model: its fitted model; a member of which no share was observed is returned with its line as it is.
    """
    compute, size = model.compute, model.largest_share_samples
    if compute is None or size <= 0:
        return member
    if member.micro_cap_samples is not None:
        # Accumulated micro-batches have at least half of the largest size: the line must not be lower there.
        size = max(1, min(size, member.micro_cap_samples // 2))
    slope, fixed = compute.per_sample_s + compute.backward_per_sample_s, compute.fixed_s + compute.backward_fixed_s
    error = PESSIMISTIC_DEVIATIONS * model.error.slope_s if model.error is not None else math.inf
    steeper = min(slope + error, slope + fixed / size)
    left = max(0.0, fixed - (steeper - slope) * size)
    backward = (compute.backward_per_sample_s * size + compute.backward_fixed_s) / (slope * size + fixed or 1.0)
    return _capped(
        replace(
            member,
            compute=replace(
                compute,
                per_sample_s=(1 - backward) * steeper,
                backward_per_sample_s=backward * steeper,
                fixed_s=(1 - backward) * left,
                backward_fixed_s=backward * left,
            ),
        ),
        UNSURE_GROWTH * model.largest_share_samples,
    )


def trusted_samples(members: Sequence[SplitMember], models: Sequence[MemberModel]) -> int:
    """Return the largest batch of which each member is trusted with its part, whatever even shares would be."""
    careful = [cautious(member, model, 0) for member, model in zip(members, models, strict=True)]
    return sum(member.cap_samples or 0 for member in careful)


def near_shares(members: Sequence[SplitMember], current: Sequence[int] | None) -> list[SplitMember]:
    """Return the members with floors near their current shares; as they are without current shares."""
    if current is None:
        return list(members)
    found = []
    for member, share in zip(members, current, strict=True):
        least = (
            share // TRUSTED_SHRINKAGE
            if member.cap_samples is None
            else min(share // TRUSTED_SHRINKAGE, member.cap_samples)
        )
        least -= least % member.granularity_samples
        found.append(replace(member, floor_samples=max(member.floor_samples, least)))
    return found


def _capped(member: SplitMember, samples: int) -> SplitMember:
    most = max(samples, member.floor_samples, member.granularity_samples)
    return replace(member, cap_samples=most if member.cap_samples is None else min(most, member.cap_samples))


def with_curves(
    total_samples: int, members: Sequence[SplitMember], models: Sequence[MemberModel]
) -> tuple[SplitMember, ...]:
    """Return the members with their time curves; as they are where too many shares would have to be tabulated.

    Args:
        total_samples: the global batch.
        members: with their lines and the user's limits.
        models: their fitted models, with lines.
    """
    most = max((TRUSTED_GROWTH * model.largest_share_samples for model in models), default=0)
    if len(members) * min(total_samples, max(most, -(-total_samples // len(members)))) > MOST_TABULATED:
        return tuple(members)
    return tuple(_curved(member, model) for member, model in zip(members, models, strict=True))


def _curved(member: SplitMember, model: MemberModel) -> SplitMember:
    compute, curve = model.compute, model.curve
    if compute is None or curve is None:
        return member
    slope, fixed = compute.per_sample_s + compute.backward_per_sample_s, compute.fixed_s + compute.backward_fixed_s
    size, (last, last_s) = curve.points[len(curve.points) // 2][0], curve.points[-1]
    backward_s = compute.backward_per_sample_s * size + compute.backward_fixed_s
    further = (_FAR_SAMPLES, last_s + slope * (_FAR_SAMPLES - last))
    return replace(
        member,
        compute=CurveTime(
            points=(*curve.points, further),
            backward_part=backward_s / (slope * size + fixed),
            update_s=compute.update_s,
        ),
    )
