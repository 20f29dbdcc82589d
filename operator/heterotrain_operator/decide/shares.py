"""Each member's share of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import CommunicationTime, Member, Prediction
from heterotrain_core.split.proportion import evenly

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Members with their shares, what they rest on, and whether they differ from the ones in force."""

    members: tuple[Member, ...]
    changed: bool
    reason: str
    probe: tuple[tuple[int, ...], ...] = ()
    probe_steps: int = 0
    communication: CommunicationTime | None = None
    prediction: Prediction | None = None


def even_shares(spec: HeteroTrainJobSpec, members: Sequence[Member]) -> Shares:
    """Return equal shares: the baseline, and what is right while nothing is known."""
    shares = evenly(spec.training.global_batch_size, len(members))
    return Shares(
        members=tuple(replace(m, share_samples=share) for m, share in zip(members, shares, strict=True)),
        changed=tuple(m.share_samples for m in members) != shares,
        reason="even shares",
    )
