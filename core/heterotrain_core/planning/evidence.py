"""What is known about a job's members, and how far a plan may rely on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.perf.counters import Observation
from heterotrain_core.perf.model import FitQuality, MemberModel
from heterotrain_core.split.member import SplitMember

TRUSTED_GROWTH = 2
"""Factor on its largest observed share that a member may be given while its model is not ok."""
SURE_GROWTH = 4
"""The same while its model is ok, which only promises good predictions at half and twice the typical share."""

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
    """Return the member with a cap near its observed shares; nearer while its model is not ok.

    A slope observed where fixed costs dominate may be zero within its error, and would attract any number of samples.

    Args:
        member: with the user's limits.
        model: its fitted model.
        even_samples: its share if all members were alike; this much is always allowed.
    """
    growth = SURE_GROWTH if model.quality is FitQuality.OK else TRUSTED_GROWTH
    seen = growth * model.largest_share_samples
    most = max(seen, even_samples, member.floor_samples, member.granularity_samples)
    return replace(member, cap_samples=most if member.cap_samples is None else min(most, member.cap_samples))
