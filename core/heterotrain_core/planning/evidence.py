"""What is known about a job's members, and the models that follow from it, for members without evidence as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.perf.counters import Observation
from heterotrain_core.perf.fit import fit_data
from heterotrain_core.perf.line import ASSUMED, FixedPart
from heterotrain_core.perf.model import FitQuality, MemberModel, at_pace
from heterotrain_core.perf.regression_data import RegressionData, summarize
from heterotrain_core.perf.shared_pace import own_variations, remove_shared_pace, shared_slowdown
from heterotrain_core.split.member import SplitMember

LIKE_ITS_POOL = 0.03
"""Least deviation of the fixed part between members of one pool, relative to their time."""
_SAME_BATCH_RATIO = 1.5
TRUSTED_GROWTH = 2
"""How many times its largest seen share a member may be given while its model is not ok."""
SURE_GROWTH = 4
"""The same while its model is ok, which says that half and twice the typical share are predicted well, and no more."""

MOST_PROBED_STEPS = 60
"""A member whose speed is still unclear after so many steps is too noisy for probes to help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvidence:
    """One member and what is known about it.

    Attributes:
        member: its name, as in its observations.
        pool: members of one pool are taken to be alike where one of them has no evidence; empty means no pool.
        observations: oldest first; may be empty or hold garbage.
        floor_samples, cap_samples, micro_cap_samples, granularity_samples: as in ``split.member.SplitMember``.
    """

    member: str
    pool: str = ""
    observations: tuple[Observation, ...] = ()
    floor_samples: int = 1
    cap_samples: int | None = None
    micro_cap_samples: int | None = None
    granularity_samples: int = 1


def learned(
    evidence: Sequence[MemberEvidence],
    former: Sequence[MemberEvidence] = (),
    *,
    total_samples: int | None = None,
) -> tuple[MemberModel, ...]:
    """Return a model for each member: its own, leaning on its pool where it is thin, or an assumed one.

    Only where nobody at all has been seen is a model's ``compute`` ``None``.

    Args:
        evidence: by rank.
        former: members that have left; they say what their pools are like and get no model.
        total_samples: the global batch for which shares are sought. If it is about the one of the last steps, models are to
            be right near the shares of those where times are no lines; otherwise, or with ``None``, for all shares alike.
    """
    known = (*evidence, *former)
    raw = [summarize(member.observations) for member in known]
    if any(each is not None and each.drift_ratio != 1.0 for each in raw):
        # Where all became slower some may seem changed and others just not quite, and be told apart for no reason.
        steady = [summarize(member.observations, steady=True) for member in known]
        shared = shared_slowdown(steady, [fit_data(each) for each in steady])
        raw = [summarize(member.observations, shared=shared) for member in known]
    common = remove_shared_pace(raw, [fit_data(each) for each in raw])
    seen = common.data
    alone = [fit_data(each) for each in seen]
    near = total_samples is not None and _near(seen[: len(evidence)], total_samples)
    found = []
    for rank, member in enumerate(evidence):
        mates = [alone[i] for i, m in enumerate(known) if m.pool and m.pool == member.pool and i != rank]
        own = alone[rank]
        shape, mine = pooled_fixed_part(mates), seen[rank]
        if own.compute is not None and mine is not None and (shape is not None or near):
            own = fit_data(mine, assumed=shape or ASSUMED, here_samples=mine.size_now if near else None)
        if own.compute is None and (like := _middle(mates) or _middle(alone)) is not None:
            whose = f"pool {member.pool}" if _middle(mates) else "the middle member"
            own = replace(own, compute=like.compute, variation=like.variation, quality=FitQuality.THIN,
                          largest_share_samples=like.largest_share_samples,
                          reason=f"{own.reason}; assumed to be like {whose}")  # fmt: skip
        found.append(replace(own, pooled=any(mate.quality is FitQuality.OK for mate in mates)))
    own_part = own_variations([member.observations for member in evidence], [model.variation for model in found])
    return tuple(
        replace(at_pace(model, common.now_ratio), variation=variation)
        for model, variation in zip(found, own_part, strict=True)
    )


def pooled_fixed_part(models: Sequence[MemberModel]) -> FixedPart | None:
    """Return what members of one pool say about the fixed part of another one's time; ``None`` where they say nothing.

    Members of a pool differ in pace more than in shape, so it is the fixed part relative to the time that they share. Their
    ratios are combined by inverse variance with a variance between members (DerSimonian and Laird 1986).
    """
    seen = [m for m in models if m.compute is not None and m.error is not None and not m.drifted]
    if not seen:
        return None
    size = sum(m.error.centre_samples for m in seen if m.error is not None) / len(seen)
    ratios, variances = [], []
    for model in seen:
        fixed, pace = _fixed(model), _pace(model.compute)
        whole = fixed + pace * size
        if whole > 0 and model.error is not None:
            ratios.append(fixed / whole)
            variances.append((model.error.at(0.0) / whole) ** 2 + 1e-12)
    if not ratios or size <= 0:
        return None
    between = max(LIKE_ITS_POOL**2, _variance_between(ratios, variances))
    weights = [1.0 / (variance + between) for variance in variances]
    mean = sum(w * r for w, r in zip(weights, ratios, strict=True)) / sum(weights)
    # What one more member of the pool is like: the mean's error, and how much members differ.
    return FixedPart(ratio=mean, deviation=math.sqrt(1.0 / sum(weights) + between), of_samples=size, seen=True)


def _variance_between(values: Sequence[float], variances: Sequence[float]) -> float:
    weights = [1.0 / variance for variance in variances]
    whole = sum(weights)
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / whole
    excess = sum(w * (x - mean) ** 2 for w, x in zip(weights, values, strict=True)) - (len(values) - 1)
    free = whole - sum(w * w for w in weights) / whole
    return max(0.0, excess / free) if free > 0 else 0.0


def _near(seen: Sequence[RegressionData | None], total_samples: int) -> bool:
    """Tell whether the last steps were made with about this batch, as far as members were there."""
    shares = [each.share_now for each in seen if each is not None]
    if not shares:
        return False
    batch = sum(shares) * len(seen) / len(shares)
    return batch / _SAME_BATCH_RATIO <= total_samples <= batch * _SAME_BATCH_RATIO


def settled(model: MemberModel) -> bool:
    """Tell whether the model is as good as it will get: nothing more is to be learned by varying shares."""
    return not model.drifted and (model.quality is FitQuality.OK or model.pooled or model.steps >= MOST_PROBED_STEPS)


def _middle(models: Sequence[MemberModel]) -> MemberModel | None:
    """Return the model of middle speed among those that have one (the slower of two), ``None`` where none has."""
    usable = [(_pace(model.compute), i) for i, model in enumerate(models) if model.compute is not None]
    return models[sorted(usable)[len(usable) // 2][1]] if usable else None


def _pace(compute: ComputeTime | None) -> float:
    return compute.per_sample_s + compute.backward_per_sample_s if compute is not None else 0.0


def _fixed(model: MemberModel) -> float:
    return model.compute.fixed_s + model.compute.backward_fixed_s if model.compute is not None else 0.0


def split_member(evidence: MemberEvidence, compute: ComputeTime) -> SplitMember:
    """Return the member as the split sees it."""
    return SplitMember(
        compute=compute,
        floor_samples=evidence.floor_samples,
        cap_samples=evidence.cap_samples,
        micro_cap_samples=evidence.micro_cap_samples,
        granularity_samples=evidence.granularity_samples,
    )


def cautious(member: SplitMember, model: MemberModel, even_samples: int) -> SplitMember:
    """Return the member with a share that does not run far ahead of what was seen; less far while its model is not ok.

    A slope seen where fixed costs dominate may be zero within its error, and would then attract any number of samples.

    Args:
        member: as it may be by the user's limits.
        model: what was learned of it.
        even_samples: what it would have if all members were alike; so much is always allowed.
    """
    growth = SURE_GROWTH if model.quality is FitQuality.OK else TRUSTED_GROWTH
    seen = growth * model.largest_share_samples
    most = max(seen, even_samples, member.floor_samples, member.granularity_samples)
    return replace(member, cap_samples=most if member.cap_samples is None else min(most, member.cap_samples))
