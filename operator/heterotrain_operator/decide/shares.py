"""Each member's share of the global batch, from what telemetry has shown of each one's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import CommunicationTime, Member, Plan, Prediction
from heterotrain_core.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares
from heterotrain_core.split.balance import Infeasible
from heterotrain_core.split.proportion import evenly

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec, RebalanceBoundary
from heterotrain_operator.world.telemetry import MemberId, Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Members with their shares, what they rest on, and whether they are worth a new revision of the plan."""

    members: tuple[Member, ...]
    changed: bool
    reason: str
    probe: tuple[tuple[int, ...], ...] = ()
    probe_steps: int = 0
    communication: CommunicationTime | None = None
    prediction: Prediction | None = None


def share_out(
    spec: HeteroTrainJobSpec, members: Sequence[Member], telemetry: Telemetry, *, current: Plan | None
) -> Shares:
    """Return the shares that the evidence supports.

    Args:
        spec: the global batch and how readily shares are changed.
        members: by rank.
        telemetry: what is known of each member's speed.
        current: the plan in force if it names the same members, ``None`` when the members are new.
    """
    batch, rebalance = spec.training.global_batch_size, spec.training.rebalance
    floor = 1 if batch >= len(members) else 0
    request = SharesRequest(
        total_samples=batch,
        members=tuple(_evidence(member, telemetry, floor) for member in members),
        current_shares=current.shares if current is not None else None,
        min_gain_ratio=rebalance.min_gain,
        rebalance=rebalance.boundary is not RebalanceBoundary.NEVER,
    )
    decision = decide_shares(request)
    if isinstance(decision, Infeasible):
        return _even(batch, members, reason=f"even shares, because {decision.reason}")
    named = tuple(
        replace(
            member,
            share_samples=share,
            micro_batch_samples=micro,
            cap_samples=evidence.cap_samples,
            compute=compute,
        )
        for member, share, micro, compute, evidence in zip(
            members, decision.shares, decision.micro_batch_samples, decision.compute, request.members, strict=True
        )
    )
    return Shares(
        members=named,
        changed=current is None or _worth_telling(decision, named, current),
        reason=decision.reason,
        probe=decision.probe,
        probe_steps=decision.probe_steps,
        communication=decision.communication,
        prediction=decision.prediction,
    )


def _worth_telling(decision: SharesDecision, members: Sequence[Member], current: Plan) -> bool:
    """Tell whether the plan in force should be replaced: other shares, a probe that begins or is over, a first model.

    Models and predictions that only became a little better are not: each revision makes every worker look.
    """
    return (
        decision.changed
        or bool(decision.probe) != bool(current.probe)
        or any(
            (new.compute is None) != (old.compute is None) or new.micro_batch_samples != old.micro_batch_samples
            for new, old in zip(members, current.members, strict=True)
        )
    )


def _evidence(member: Member, telemetry: Telemetry, floor: int) -> MemberEvidence:
    identity = MemberId(member.worker_uid, member.local_rank)
    gauges = telemetry.gauges.get(identity)
    return MemberEvidence(
        member=f"{member.worker}/{member.local_rank}" if member.local_rank else member.worker,
        pool=member.pool,
        observations=telemetry.observations.get(identity, ()),
        floor_samples=floor,
        micro_cap_samples=gauges.micro_batch_cap_samples if gauges else None,
    )


def _even(batch: int, members: Sequence[Member], *, reason: str) -> Shares:
    shares = evenly(batch, len(members))
    return Shares(
        members=tuple(replace(m, share_samples=share) for m, share in zip(members, shares, strict=True)),
        changed=tuple(m.share_samples for m in members) != shares,
        reason=reason,
    )
