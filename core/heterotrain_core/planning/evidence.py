"""What is known about a job's members, and the models that follow from it, for members without evidence as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.perf.fit import FixedPart, fit_member
from heterotrain_core.perf.model import MemberModel, Verdict
from heterotrain_core.perf.samples import Observation
from heterotrain_core.split.curve import SplitMember

_LIKE_ITS_POOL = 0.1
"""Deviation of the fixed part between members of one pool."""
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
        floor_samples, cap_samples, micro_cap_samples, granularity_samples: as in ``split.curve.SplitMember``.
    """

    member: str
    pool: str = ""
    observations: tuple[Observation, ...] = ()
    floor_samples: int = 1
    cap_samples: int | None = None
    micro_cap_samples: int | None = None
    granularity_samples: int = 1


def learned(evidence: Sequence[MemberEvidence], former: Sequence[MemberEvidence] = ()) -> tuple[MemberModel, ...]:
    """Return a model for each member: its own, leaning on its pool where it is thin, or an assumed one.

    Only where nobody at all has been seen is a model's ``compute`` ``None``.

    Args:
        evidence: by rank.
        former: members that have left; they say what their pools are like and get no model.
    """
    known = (*evidence, *former)
    fits = [fit_member(member.observations) for member in known]
    found = []
    for member, fit in zip(evidence, fits, strict=False):
        own = fit
        mates = [f for m, f in zip(known, fits, strict=True) if m.pool == member.pool and m.pool]
        if own.verdict is Verdict.THIN and (mate := _middle([f for f in mates if f.verdict is Verdict.OK])):
            assumed = FixedPart(ratio=_fixed_ratio(mate), deviation=_LIKE_ITS_POOL)
            own = fit_member(member.observations, assumed=assumed)
        if own.compute is None and (like := _middle(mates) or _middle(fits)) is not None:
            whose = f"pool {member.pool}" if _middle(mates) else "the middle member"
            own = replace(own, compute=like.compute, variation=like.variation, verdict=Verdict.THIN,
                          largest_share_samples=like.largest_share_samples,
                          reason=f"{own.reason}; assumed to be like {whose}")  # fmt: skip
        found.append(own)
    return tuple(found)


def settled(model: MemberModel) -> bool:
    """Tell whether the model is as good as it will get: nothing more is to be learned by varying shares."""
    return not model.drifted and (model.verdict is Verdict.OK or model.steps >= MOST_PROBED_STEPS)


def _middle(models: Sequence[MemberModel]) -> MemberModel | None:
    """Return the model of middle speed among those that have one (the slower of two), ``None`` where none has."""
    usable = [(_pace(model.compute), i) for i, model in enumerate(models) if model.compute is not None]
    return models[sorted(usable)[len(usable) // 2][1]] if usable else None


def _pace(compute: ComputeTime) -> float:
    return compute.per_sample_s + compute.backward_per_sample_s


def _fixed_ratio(model: MemberModel) -> float:
    """Return the fixed part of the model's time at its largest seen share."""
    compute = model.compute
    if compute is None:
        return 0.0
    fixed = compute.fixed_s + compute.backward_fixed_s
    whole = fixed + _pace(compute) * max(1, model.largest_share_samples)
    return fixed / whole if whole > 0 else 0.0


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
    growth = SURE_GROWTH if model.verdict is Verdict.OK else TRUSTED_GROWTH
    seen = growth * model.largest_share_samples
    most = max(seen, even_samples, member.floor_samples, member.granularity_samples)
    return replace(member, cap_samples=most if member.cap_samples is None else min(most, member.cap_samples))
