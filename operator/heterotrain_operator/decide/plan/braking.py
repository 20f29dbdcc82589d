"""Brakes: takes shares back whose steps take far longer than the plan predicts."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.contract.plan import Boundary, BoundaryKind, CommunicationTime, Plan
from heterotrain_core.split.balance import Split, evaluate
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.planning.brake import Brake, MemberInForce, brake_of
from heterotrain_planner.planning.evidence import MemberEvidence

from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.arrangement import identity_of
from heterotrain_operator.decide.plan.revision import is_used

NEXT_STEP = Boundary(kind=BoundaryKind.STEPS, every_steps=1)


def braking(plan: Plan, evidence: Sequence[MemberEvidence], telemetry: Telemetry) -> Brake | None:
    """Return why the shares in force are to be taken back; ``None`` if they may stay.

    A newer plan may wait for its boundary. Then its models say what the shares in force should take.

    Args:
        plan: the newest plan.
        evidence: its members, by rank.
        telemetry: measurements of each rank.
    """
    in_force = plan.shares if is_used(plan, telemetry) else _in_force(plan, telemetry)
    lines = [
        SplitMember(compute=member.compute, floor_samples=0, micro_cap_samples=member.micro_batch_samples or None)
        for member in plan.members
        if member.compute is not None
    ]
    if plan.prediction is None or in_force is None or len(lines) < len(plan.members):
        return None
    expected = evaluate(in_force, lines, communication=plan.communication or CommunicationTime())
    if not isinstance(expected, Split):
        return None
    predicted_s = plan.prediction.step_s
    return brake_of(
        [
            MemberInForce(share_samples=share, predicted_s=own_s, observations=known.observations)
            for share, own_s, known in zip(in_force, expected.own_s, evidence, strict=True)
        ],
        predicted_step_s=predicted_s if in_force == plan.shares else max(expected.step_s, predicted_s),
    )


def _in_force(plan: Plan, telemetry: Telemetry) -> tuple[int, ...] | None:
    """Return the shares of most steps while a newer plan waits; ``None`` where they are not known of all members."""
    first = {rank.member: rank for rank in reversed(plan.ranks)}
    done = [telemetry.in_force.get(identity_of(first[index])) for index in range(len(plan.members))]
    found = tuple(max(each.steps, key=each.steps.__getitem__) for each in done if each is not None and each.steps)
    return found if len(found) == len(plan.members) else None
