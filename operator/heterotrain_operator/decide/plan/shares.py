"""The global batch and each member's share of it, from learned speeds and the measured noise of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.choices import Parallelism, Runtime
from heterotrain_core.contract.plan import Boundary, Plan
from heterotrain_core.split.balance import Infeasible
from heterotrain_core.split.proportion import evenly
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange
from heterotrain_planner.perf.model import ExchangeModel, MemberModel
from heterotrain_planner.planning.batch import BatchRequest, decide_batch
from heterotrain_planner.planning.brake import Brake
from heterotrain_planner.planning.fitting import MemberFits, fit_members
from heterotrain_planner.planning.probe import PROBE_STEPS
from heterotrain_planner.planning.shares import MemberEvidence, SharesDecision, SharesRequest, shares_of_models

from heterotrain_operator.api.training import RebalanceBoundary
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.arrangement import have_same_members, identities_of
from heterotrain_operator.decide.plan.braking import NEXT_STEP, braking
from heterotrain_operator.decide.plan.evidence import evidence_of, keys_of, other_evidence
from heterotrain_operator.decide.plan.revision import (
    BoundaryDistance,
    distance_to_boundary,
    is_used,
    least_gain,
    next_boundary,
    trust_ratio,
    worth_writing,
)
from heterotrain_operator.decide.plan.speeds import JobSpeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The division of the global batch among members, and whether it is worth a new revision of the plan.

    Attributes:
        plan: the members with their shares, and what these rest on.
        changed: whether the shares are worth a new revision.
        reason: why these shares, in one or two sentences.
        boundary: when a revision with them takes effect; ``None`` where the spec alone says it.
        batch_reason: why this global batch; empty where it was not decided.
        decision: the planner's decision with all findings; ``None`` where the batch cannot be shared by the rules.
    """

    plan: Plan
    changed: bool
    reason: str
    boundary: Boundary | None = None
    batch_reason: str = ""
    decision: SharesDecision | None = None


def share_out(
    spec: HeteroTrainJobSpec,
    draft: Plan,
    telemetry: Telemetry,
    speeds: JobSpeeds,
    *,
    plan: Plan | None,
    exchange: MeasuredExchange,
) -> Shares:
    """Return the shares of new members by the speeds that were learned before: a look-up, not a fit.

    Args:
        spec: the job's spec: global batch and rules for changing shares.
        draft: the members and their ranks.
        telemetry: measurements of each rank.
        speeds: as learned from earlier members.
        plan: the newest plan, whatever its members; ``None`` when there is none.
        exchange: what is known of the exchange among all members that the job has had.
    """
    terms = _terms_of(spec, draft, telemetry, plan=plan, observed=False)
    keys = keys_of(draft)
    if (given := _without_models(spec, terms, measured=speeds.has_all(keys))) is not None:
        return given
    among = _exchange_among(terms, speeds.exchange, exchange)
    return _divided(spec, terms, telemetry, speeds.of(keys), among, batch=_batch_in_force(spec, terms, telemetry))


def learn_shares(
    spec: HeteroTrainJobSpec, plan: Plan, telemetry: Telemetry, *, exchange: MeasuredExchange
) -> tuple[Shares, JobSpeeds | None]:
    """Return the best batch and shares of a plan's members, and what their steps show of their speeds.

    This fits models, which takes a tenth of a millisecond for each observation: it is the learner's work.

    Args:
        spec: the job's spec: global batch and rules for changing shares.
        plan: the newest plan, with members.
        telemetry: measurements of each rank.
        exchange: what is known of the exchange among all members that the job has had.

    Returns:
        The speeds are ``None`` where shares do not depend on them.
    """
    terms = _terms_of(spec, plan, telemetry, plan=plan, observed=True)
    measured = all(member.observations for member in terms.evidence)
    if (given := _without_models(spec, terms, measured=measured)) is not None:
        return given, None
    cuts = spec.parallelism.is_planned and spec.parallelism.mode is not Parallelism.AUTO
    others = () if cuts else other_evidence(plan, telemetry)
    fits = fit_members(terms.evidence, others)
    fits = replace(fits, exchange=_exchange_among(terms, fits.exchange, exchange))
    brake = None if spec.training.rebalance.keeps_even else braking(plan, terms.evidence, telemetry)
    if brake is not None:
        terms = replace(terms, boundary=NEXT_STEP, distance=BoundaryDistance.NEAR)
    batch = _best_batch(spec, terms, telemetry, fits)
    models, former = fits.all_models(total_samples=batch[0])
    speeds = JobSpeeds(
        members=dict(zip(keys_of(plan), models, strict=True)),
        former=tuple(zip((each.pool for each in others), former, strict=True)),
        exchange=fits.exchange,
    )
    return _divided(spec, terms, telemetry, models, fits.exchange, batch=batch, brake=brake), speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What shares are decided for.

    Attributes:
        draft: the members and their ranks.
        evidence: about each member, by index.
        plan: the newest plan, whatever its members.
        current: the same, if it has these members.
        boundary: when the next revision would take effect.
        distance: how far that is.
    """

    draft: Plan
    evidence: tuple[MemberEvidence, ...]
    plan: Plan | None
    current: Plan | None
    boundary: Boundary
    distance: BoundaryDistance


def _terms_of(
    spec: HeteroTrainJobSpec, draft: Plan, telemetry: Telemetry, *, plan: Plan | None, observed: bool
) -> _Terms:
    current = plan if plan is not None and have_same_members(draft, plan) else None
    boundary = next_boundary(spec.training.rebalance, current, telemetry)
    return _Terms(
        draft=draft,
        evidence=evidence_of(spec, draft, telemetry, observed=observed),
        plan=plan,
        current=current,
        boundary=boundary,
        distance=BoundaryDistance.NEAR if current is None else distance_to_boundary(boundary, telemetry),
    )


def _without_models(spec: HeteroTrainJobSpec, terms: _Terms, *, measured: bool) -> Shares | None:
    """Return the shares where they do not follow from speeds, or not yet; otherwise ``None``."""
    draft = terms.draft
    if spec.runtime is Runtime.TORCHRUN:  # one sample stands for each rank's equal part of a batch that only it knows
        unlimited = [replace(each, micro_cap_samples=None) for each in terms.evidence]
        reason = "equal shares, because the runtime is Torchrun"
        return _even(len(draft.members), draft, unlimited, reason=reason)
    if spec.parallelism.is_planned and draft.prediction is not None and not measured:
        return _as_planned(draft, changed=terms.current is None)
    return None


def _divided(
    spec: HeteroTrainJobSpec,
    terms: _Terms,
    telemetry: Telemetry,
    models: Sequence[MemberModel],
    exchange: ExchangeModel,
    *,
    batch: tuple[int, str],
    brake: Brake | None = None,
) -> Shares:
    """Return the division of a batch, which comes with its reason, by these models."""
    rebalance, current, (samples, why) = spec.training.rebalance, terms.current, batch
    decision = shares_of_models(
        SharesRequest(
            total_samples=samples,
            members=terms.evidence,
            current_shares=current.shares if current is not None else None,
            least_gain_ratio=least_gain(terms.distance),
            trust_ratio=trust_ratio(current, telemetry, terms.distance),
            taken_back=brake.back_to if brake is not None else None,
            rebalance=not rebalance.keeps_even,
            probe=rebalance.boundary is not RebalanceBoundary.AUTO,
            least_members=spec.elastic_policy.min_replicas,
        ),
        models,
        exchange,
    )
    if isinstance(decision, Infeasible):
        if spec.parallelism.is_planned and sum(terms.draft.shares) == samples:  # even ones may exceed planned memory
            return replace(_as_planned(terms.draft, changed=current is None), reason=f"as planned: {decision.reason}")
        return _even(samples, terms.draft, terms.evidence, reason=f"even shares, because {decision.reason}")
    reasons = (
        brake.reason if brake is not None else "",
        why if terms.plan is None or samples != terms.plan.global_batch_samples else "",
        decision.reason,
    )
    plan = _with_shares(terms, decision)
    return Shares(
        plan=plan,
        changed=current is None
        or worth_writing(plan, current, terms.distance)
        or _comes_too_late(current, brake, telemetry),
        boundary=terms.boundary,
        reason="; ".join(filter(None, reasons)),
        batch_reason=why,
        decision=decision,
    )


def _with_shares(terms: _Terms, decision: SharesDecision) -> Plan:
    """Return the members with the shares of a decision."""
    rows = zip(terms.draft.members, terms.evidence, decision.shares, decision.compute, strict=True)
    return replace(
        terms.draft,
        members=tuple(
            replace(
                member,
                share_samples=share,
                micro_batch_samples=known.micro_cap_samples or 0,
                cap_samples=known.cap_samples,
                compute=compute,
            )
            for member, known, share, compute in rows
        ),
        global_batch_samples=sum(decision.shares),
        probe=decision.probe,
        probe_steps=PROBE_STEPS if decision.probe else 0,
        communication=decision.exchange.communication,
        prediction=decision.prediction,
    )


def _comes_too_late(plan: Plan, brake: Brake | None, telemetry: Telemetry) -> bool:
    """Return whether a plan waits for a later boundary than the next step, while the one in force is far too slow."""
    return brake is not None and plan.boundary != NEXT_STEP and not is_used(plan, telemetry)


def _exchange_among(terms: _Terms, fitted: ExchangeModel, learned: MeasuredExchange) -> ExchangeModel:
    """Return the exchange among these members: as measured among them, or as expected from others.

    Right after a change of members, all measurements are of the members before. So the newest plan's exchange is taken,
    scaled to the number of members now.
    """
    plan, current = terms.plan, terms.current
    plan_members = len(plan.members) if plan is not None else 0
    measured = plan is not None and fitted.generation is not None and fitted.generation >= plan.generation
    if measured and current is not None:
        return fitted
    if plan is None or plan_members < 2:  # noqa: PLR2004  # a single member exchanges nothing
        known = learned
    else:
        found = fitted.communication if measured else plan.communication
        known = replace(learned, communication=found, members=plan_members) if found is not None else learned
    if known.members < 2:  # noqa: PLR2004  # as above
        return fitted
    members = len(terms.draft.members)
    if members == known.members and current is not None:
        communication = known.communication
    else:
        workers = {identity.worker_uid for ranks in identities_of(terms.draft) for identity in ranks}
        communication = known.among(members, across=len(workers) > 1)
    among = f"{members} members, expected from the exchange among {known.members}"
    return replace(fitted, communication=communication, reason=f"{among}: {fitted.reason}")


def _as_planned(draft: Plan, *, changed: bool) -> Shares:
    """Return the shares that the layout planner chose: they hold as long as a member has no measurement of its own.

    Members of different shapes say nothing about each other. So models are fitted once all of them are measured.
    """
    return Shares(
        plan=replace(draft, probe=(), probe_steps=0),
        changed=changed,
        reason="shares by the measured units, until the members are measured",
    )


def _batch_in_force(spec: HeteroTrainJobSpec, terms: _Terms, telemetry: Telemetry) -> tuple[int, str]:
    """Return the batch of new members: they start at once, in the middle of an epoch, but a new batch waits."""
    adaptive, newest = spec.training.adaptive_batch, telemetry.newest
    if adaptive is None:
        return spec.training.base_batch_samples, ""
    if terms.plan is None:
        return adaptive.least_samples, ""
    in_force = newest.global_batch_samples if newest is not None else None
    wanted = terms.plan.global_batch_samples if in_force is None else in_force
    return min(max(wanted, adaptive.least_samples), _most_samples(spec, telemetry)), ""


def _most_samples(spec: HeteroTrainJobSpec, telemetry: Telemetry) -> int:
    """Return the largest adaptive batch: a step is at most one epoch."""
    adaptive, newest = spec.training.adaptive_batch, telemetry.newest
    assert adaptive is not None  # noqa: S101  # the caller has one
    if newest is None or not newest.epoch_samples:
        return adaptive.most_samples
    return max(adaptive.least_samples, min(adaptive.most_samples, newest.epoch_samples))


def _best_batch(spec: HeteroTrainJobSpec, terms: _Terms, telemetry: Telemetry, fits: MemberFits) -> tuple[int, str]:
    """Return the global batch of the plan's members with the reason for it; it is empty where nothing is decided."""
    adaptive, current, newest = spec.training.adaptive_batch, terms.current, telemetry.newest
    if adaptive is None or current is None:
        return _batch_in_force(spec, terms, telemetry)
    most = _most_samples(spec, telemetry)
    planned = min(max(current.global_batch_samples, adaptive.least_samples), most)
    if terms.distance is BoundaryDistance.FAR:
        return planned, ""
    answer = decide_batch(
        BatchRequest(
            members=fits.evidence,
            former=fits.former,
            base_samples=spec.training.base_batch_samples,
            least_samples=adaptive.least_samples,
            most_samples=most,
            current_samples=planned,
            noise_samples=newest.noise_scale_samples if newest is not None else None,
            even=spec.training.rebalance.keeps_even,
        ),
        fits=fits,
    )
    if isinstance(answer, Infeasible):
        return planned, f"the batch stays at {planned} samples, because {answer.reason}"
    return answer.samples, answer.reason


def _even(batch: int, draft: Plan, evidence: Sequence[MemberEvidence], *, reason: str) -> Shares:
    shares = evenly(batch, len(draft.members))
    members = tuple(
        replace(member, share_samples=share, micro_batch_samples=known.micro_cap_samples or 0)
        for member, known, share in zip(draft.members, evidence, shares, strict=True)
    )
    return Shares(
        plan=replace(
            draft,
            members=members,
            global_batch_samples=batch,
            probe=(),
            probe_steps=0,
            communication=None,
            prediction=None,
        ),
        changed=draft.shares != shares,
        reason=reason,
    )
