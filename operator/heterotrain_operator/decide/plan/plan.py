"""The next plan: members and shares with a version above every plan that the workers may hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from heterotrain_core.contract.codec import Refused
from heterotrain_core.contract.plan import BoundaryKind, Plan

from heterotrain_operator.api.training import RebalanceBoundary
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobView, PlanObject
from heterotrain_operator.decide.plan.braking import NEXT_STEP
from heterotrain_operator.decide.plan.membership import MembershipDecision
from heterotrain_operator.decide.plan.revision import next_boundary
from heterotrain_operator.decide.plan.shares import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """The plan that the cluster holds, or the problem with it.

    ``newest`` is the highest version that workers may ever have seen. The status mirrors it, so that the replacement
    of a deleted or damaged plan gets a higher version.
    """

    plan: Plan | None
    problem: str
    newest: tuple[int, int]


def read_plan(job: JobView, found: PlanObject | None) -> PlanInForce:
    """Return the plan in force."""
    mirrored = job.status.plan.newest
    if found is None:
        return PlanInForce(plan=None, problem="there is no plan" if mirrored != (0, 0) else "", newest=mirrored)
    plan = found.plan if found.owner_uid == job.uid else Refused(reason="the plan is of another job")
    if isinstance(plan, Refused):
        return PlanInForce(plan=None, problem=plan.reason, newest=mirrored)
    newest = (max(plan.generation, mirrored[0]), max(plan.revision, mirrored[1]))
    if plan.revision < mirrored[1]:  # every plan raises the revision, also one of generation 0
        return PlanInForce(plan=None, problem=f"plan {plan.version} is older than {mirrored}", newest=newest)
    return PlanInForce(plan=plan, problem="", newest=newest)


def next_plan(
    job: JobView, spec: HeteroTrainJobSpec, in_force: PlanInForce, membership: MembershipDecision, shares: Shares | None
) -> Plan | None:
    """Return the plan to write, or ``None`` when the plan in force stays.

    Args:
        job: the job.
        spec: its spec.
        in_force: the plan in force.
        membership: members of a new generation, if there is to be one.
        shares: the shares of the members, ``None`` when there are no members yet or nothing was decided.
    """
    generation, revision = in_force.newest
    current = in_force.plan
    rebalance = spec.training.rebalance
    boundary, min_replicas = next_boundary(rebalance, None, Telemetry()), least_to_go_on(spec)
    request = job.checkpoint_request if spec.checkpoint is not None else ""
    if membership.workers is not None and shares is not None:
        named = {rank.worker for rank in shares.plan.ranks}
        return replace(
            shares.plan,
            job_uid=job.uid,
            generation=generation + 1,
            revision=revision + 1,
            drain=tuple(name for name in membership.drain if name in named),
            reason="; ".join(filter(None, (in_force.problem, membership.reason, shares.reason))),
            spares=membership.spares,
            boundary=boundary,
            min_replicas=min_replicas,
            checkpoint_request=request,
        )
    if current is None:
        # Generation 0 is older than the plan of running members, so they go on, while new workers wait.
        first = in_force.newest == (0, 0) and not in_force.problem
        return Plan(
            job_uid=job.uid,
            generation=0,
            revision=0 if first else revision + 1,
            members=(),
            ranks=(),
            global_batch_samples=spec.training.base_batch_samples,
            reason=in_force.problem or "waiting for workers",
            boundary=boundary,
            min_replicas=min_replicas,
        )
    follows = rebalance.boundary is RebalanceBoundary.AUTO and current.boundary.kind is BoundaryKind.STEPS
    changed = shares if shares is not None and shares.changed else None
    if changed is not None and changed.boundary is not None:
        boundary = changed.boundary
    elif follows or current.boundary == NEXT_STEP:
        boundary = current.boundary
    wanted = replace(
        changed.plan if changed is not None else current,
        drain=membership.drain,
        spares=membership.spares,
        boundary=boundary,
        min_replicas=min_replicas,
        checkpoint_request=request if current.members else "",
    )
    return _revision(current, wanted, in_force.newest, membership, changed.reason if changed is not None else "")


def _revision(
    current: Plan, wanted: Plan, newest: tuple[int, int], membership: MembershipDecision, why_shares: str
) -> Plan | None:
    """Return a new revision of the members in force; ``None`` without any change."""
    reasons = [
        membership.reason if membership.drain != current.drain else "",
        _spares_text(current.spares, wanted.spares),
        _request_text(current.checkpoint_request, wanted.checkpoint_request),
        why_shares,
    ]
    if wanted == current:
        return None
    reason = "; ".join(filter(None, reasons)) or "the spec changed"
    kept = newest[0] if current.members else 0  # a plan without members is always of generation 0
    return replace(wanted, generation=kept, revision=newest[1] + 1, reason=reason)


def least_to_go_on(spec: HeteroTrainJobSpec) -> int:
    """Return the fewest members with which a formation may go on.

    Planned members are at least ``minReplicas`` when a plan is made, so that a loss leaves a whole one. That one goes
    on: else two members would survive a loss no better than one.
    """
    return 1 if spec.parallelism.is_planned else spec.elastic_policy.min_replicas


def _spares_text(before: Collection[str], after: Collection[str]) -> str:
    """Return which workers became spares, and which spares are gone, in a clause."""
    new, gone = (", ".join(sorted(set(a) - set(b))) for a, b in ((after, before), (before, after)))
    return "; ".join([*([f"{new} becomes a spare"] if new else []), *([f"without the spare {gone}"] if gone else [])])


def _request_text(before: str, after: str) -> str:
    """Return what has become of a user's request for a checkpoint, in a clause."""
    if before == after:
        return ""
    return "a checkpoint is asked for" if after else "no checkpoint is asked for any more"
