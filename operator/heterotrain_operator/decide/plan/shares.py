"""The global batch and each member's share of it, from measured speeds and the measured noise of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.choices import Parallelism, Runtime
from heterotrain_core.contract.plan import Boundary, Division, Layout, Member, Plan
from heterotrain_core.split.balance import Infeasible
from heterotrain_core.split.proportion import evenly
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange
from heterotrain_planner.perf.memory import MemoryPeak, micro_batch_cap
from heterotrain_planner.perf.model import ExchangeModel
from heterotrain_planner.perf.ranks import observations_of_member
from heterotrain_planner.planning.batch import BatchRequest, decide_batch
from heterotrain_planner.planning.brake import Brake
from heterotrain_planner.planning.fitting import MemberFits, fit_members
from heterotrain_planner.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares

from heterotrain_operator.api.training import RebalanceBoundary
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Telemetry
from heterotrain_operator.decide.plan.arrangement import Arrangement, arrangement_of
from heterotrain_operator.decide.plan.braking import NEXT_STEP, braking
from heterotrain_operator.decide.plan.revision import (
    BoundaryDistance,
    distance_to_boundary,
    is_used,
    least_gain,
    next_boundary,
    trust_ratio,
    worth_writing,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The division of the global batch among members, and whether it is worth a new revision of the plan.

    Attributes:
        arrangement: the members and their ranks; the members' shares are in ``division``.
        division: what a plan for these members carries.
        changed: whether the division is worth a new revision.
        reason: why these shares, in one or two sentences.
        boundary: when a revision with them takes effect; ``None`` where the spec alone says it.
        batch_reason: why this global batch; empty where it was not decided.
        decision: the core's decision with all findings; ``None`` where the batch cannot be shared by the rules.
    """

    arrangement: Arrangement
    division: Division
    changed: bool
    reason: str
    boundary: Boundary | None = None
    batch_reason: str = ""
    decision: SharesDecision | None = None


def share_out(
    spec: HeteroTrainJobSpec,
    arrangement: Arrangement,
    telemetry: Telemetry,
    *,
    plan: Plan | None,
    exchange: MeasuredExchange | None = None,
) -> Shares:
    """Return the batch and the shares that the evidence supports.

    Args:
        spec: the job's spec: global batch and rules for changing shares.
        arrangement: the members and their ranks.
        telemetry: measurements of each rank.
        plan: the newest plan, whatever its members; ``None`` when there is none.
        exchange: what is known of the exchange among all members that the job has had; ``None`` for nothing.
    """
    members = arrangement.members
    if spec.runtime is Runtime.TORCHRUN:  # one sample stands for each rank's equal part of a batch that only it knows
        unlimited = [
            MemberEvidence(member=name, pool=m.pool) for m, name in zip(members, arrangement.names, strict=True)
        ]
        return _even(len(members), arrangement, unlimited, reason="equal shares, because the runtime is Torchrun")
    current = plan if plan is not None and arrangement.matches(arrangement_of(plan)) else None
    rebalance = spec.training.rebalance
    boundary = next_boundary(rebalance, current, telemetry)
    distance = BoundaryDistance.NEAR if current is None else distance_to_boundary(boundary, telemetry)
    floor = 1 if spec.training.base_batch_samples >= len(members) else 0
    limits = {pool.name: pool.micro_batch_size for pool in spec.worker_pools}
    cuts = spec.parallelism.is_planned and spec.parallelism.mode is not Parallelism.AUTO
    evidence = tuple(
        replace(
            _evidence(member, identities, telemetry, limits.get(member.pool), planned=_was_planned(spec, member)),
            member=name,
            floor_samples=floor,
        )
        for member, name, identities in zip(members, arrangement.names, arrangement.identities, strict=True)
    )
    if spec.parallelism.is_planned and (as_planned := _as_planned(arrangement, evidence, current)):
        return as_planned
    fits = fit_members(evidence, () if cuts else _former(arrangement, telemetry))
    learned = exchange or MeasuredExchange()
    fits = replace(fits, exchange=_exchange_among(arrangement, fits.exchange, plan, current, learned))
    brake = braking(current, evidence, telemetry) if current is not None and not rebalance.keeps_even else None
    if brake is not None:
        boundary, distance = NEXT_STEP, BoundaryDistance.NEAR
    batch, why = _batch(spec, fits, telemetry, plan=plan, current=current, distance=distance)
    decision = decide_shares(
        SharesRequest(
            total_samples=batch,
            members=fits.evidence,
            former=fits.former,
            current_shares=current.shares if current is not None else None,
            least_gain_ratio=least_gain(distance),
            trust_ratio=trust_ratio(current, telemetry, distance),
            taken_back=brake.back_to if brake is not None else None,
            rebalance=not rebalance.keeps_even,
            probe=rebalance.boundary is not RebalanceBoundary.AUTO,
            least_members=spec.elastic_policy.min_replicas,
        ),
        fits=fits,
    )
    if isinstance(decision, Infeasible):
        return _even(batch, arrangement, evidence, reason=f"even shares, because {decision.reason}")
    return Shares(
        arrangement=arrangement,
        division=decision.division,
        changed=current is None
        or worth_writing(decision, current, distance)
        or _comes_too_late(current, brake, telemetry),
        boundary=boundary,
        reason="; ".join(
            filter(
                None,
                (
                    brake.reason if brake is not None else "",
                    why if plan is None or batch != plan.global_batch_samples else "",
                    decision.reason,
                ),
            )
        ),
        batch_reason=why,
        decision=decision,
    )


def _comes_too_late(plan: Plan, brake: Brake | None, telemetry: Telemetry) -> bool:
    """Return whether a plan waits for a later boundary than the next step, while the one in force is far too slow."""
    return brake is not None and plan.boundary != NEXT_STEP and not is_used(plan, telemetry)


def _exchange_among(
    arrangement: Arrangement, fitted: ExchangeModel, plan: Plan | None, current: Plan | None, learned: MeasuredExchange
) -> ExchangeModel:
    """Return the exchange among these members: as measured among them, or as expected from others.

    Right after a change of members, all measurements are of the members before. So the newest plan's exchange is taken,
    scaled to the number of members now.
    """
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
    members = len(arrangement.members)
    if members == known.members and current is not None:
        communication = known.communication
    else:
        workers = {identity.worker_uid for ranks in arrangement.identities for identity in ranks}
        communication = known.among(members, across=len(workers) > 1)
    among = f"{members} members, expected from the exchange among {known.members}"
    return replace(fitted, communication=communication, reason=f"{among}: {fitted.reason}")


def _as_planned(arrangement: Arrangement, evidence: Sequence[MemberEvidence], current: Plan | None) -> Shares | None:
    """Return the shares that the layout planner chose, as long as a member has no measurement of its own.

    Members of different shapes say nothing about each other. So models are fitted once all of them are measured.
    """
    members = arrangement.members
    if arrangement.prediction is None or all(member.observations for member in evidence):
        return None
    return Shares(
        arrangement=arrangement,
        division=Division(
            shares=tuple(member.share_samples for member in members),
            micro_batch_samples=tuple(member.micro_batch_samples for member in members),
            cap_samples=tuple(member.cap_samples for member in members),
            compute=tuple(member.compute for member in members),
            communication=arrangement.communication,
            prediction=arrangement.prediction,
        ),
        changed=current is None,
        reason="shares by the measured units, until the members are measured",
    )


def _batch(
    spec: HeteroTrainJobSpec,
    fits: MemberFits,
    telemetry: Telemetry,
    *,
    plan: Plan | None,
    current: Plan | None,
    distance: BoundaryDistance,
) -> tuple[int, str]:
    """Return the global batch with the reason for it, which is empty where the batch is not decided now."""
    adaptive = spec.training.adaptive_batch
    if adaptive is None:
        return spec.training.base_batch_samples, ""
    newest = telemetry.newest
    most = adaptive.most_samples
    if newest is not None and newest.epoch_samples:
        most = max(adaptive.least_samples, min(most, newest.epoch_samples))  # a step is at most one epoch
    if plan is None:
        return adaptive.least_samples, ""
    planned = min(max(plan.global_batch_samples, adaptive.least_samples), most)
    if current is None:
        # New members start at once, in the middle of an epoch, but a new batch waits for the boundary.
        in_force = newest.global_batch_samples if newest is not None else None
        return (planned if in_force is None else min(max(in_force, adaptive.least_samples), most)), ""
    if distance is BoundaryDistance.FAR:
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


def _evidence(
    member: Member,
    ranks: Sequence[MemberId],
    telemetry: Telemetry,
    limit_samples: int | None,
    *,
    planned: bool,
) -> MemberEvidence:
    """Return the evidence about a member.

    Args:
        member: the member.
        ranks: its ranks, as telemetry names them.
        telemetry: measurements of each rank.
        limit_samples: largest micro-batch of one rank by the job's spec.
        planned: whether the member's micro-batch was planned together with what its ranks hold.
    """
    layout = member.layout
    scales = _scales(layout)
    caps = [math.floor(limit_samples * min(scales))] if limit_samples is not None else []
    caps += [member.micro_batch_samples] if planned and member.micro_batch_samples else []
    found = [telemetry.gauges.get(rank) for rank in ranks]
    for index, gauges in enumerate(found):
        scale = scales[index % layout.shards]  # the ranks of each stage follow each other by shard
        if gauges is not None and (cap := _micro_cap(gauges, scale)) is not None:
            caps.append(cap)
    divided = f", cut at {layout.cuts}" if layout.cuts else ""
    divided += f", parts {layout.state_weights}" if layout.state_weights else ""
    return MemberEvidence(
        member=f"{ranks[0].worker_uid}/{ranks[0].local_rank}",
        pool=f"{member.pool}{divided}",
        observations=observations_of_member([telemetry.observations.get(rank, ()) for rank in ranks]),
        micro_cap_samples=min(caps, default=None),
        granularity_samples=member.granularity_samples,
    )


def _was_planned(spec: HeteroTrainJobSpec, member: Member) -> bool:
    """Return whether a member's micro-batch was planned together with what its ranks hold."""
    by_mode = spec.parallelism.is_planned and spec.parallelism.mode is not Parallelism.AUTO
    return by_mode or bool(member.layout.state_weights)


def _scales(layout: Layout) -> tuple[float, ...]:
    """Return for each shard how many times as large as its own part a micro-batch of the member is."""
    weights = layout.sample_weights or (1,) * layout.shards
    return tuple(sum(weights) / max(1, weight) for weight in weights)


def _micro_cap(gauges: MemberGauges, scale: float) -> int | None:
    """Return the largest micro-batch of the member that is expected to fit into the rank's memory, ``None`` if unknown.

    Ranks report peaks by the member's micro-batch, and the size that ran out of memory by their own part of it.
    """
    peaks = [MemoryPeak(micro_batch_samples=size, peak_bytes=used) for size, used in gauges.peak_memory_bytes.items()]
    if (cap := gauges.micro_batch_cap_samples) is not None:
        ran_out = round(2 * cap * scale)  # the cap is half of the size that ran out
        peaks.append(MemoryPeak(micro_batch_samples=ran_out, ran_out=True))
    return micro_batch_cap(peaks, memory_bytes=gauges.device_memory_bytes).samples


def _former(arrangement: Arrangement, telemetry: Telemetry) -> tuple[MemberEvidence, ...]:
    """Return the evidence about other ranks: those that have left, and those that are not in the plan yet."""
    names = {identity for member in arrangement.identities for identity in member}
    return tuple(
        MemberEvidence(
            member=f"{identity.worker_uid}/{identity.local_rank}",
            pool=telemetry.pools[identity],
            observations=telemetry.observations[identity],
        )
        for identity in telemetry.observations
        if identity not in names and identity in telemetry.pools
    )


def _even(batch: int, arrangement: Arrangement, evidence: Sequence[MemberEvidence], *, reason: str) -> Shares:
    members = arrangement.members
    shares = evenly(batch, len(members))
    return Shares(
        arrangement=arrangement,
        division=Division(
            shares=shares,
            micro_batch_samples=tuple(found.micro_cap_samples or 0 for found in evidence),
            cap_samples=tuple(member.cap_samples for member in members),
            compute=tuple(member.compute for member in members),
        ),
        changed=tuple(m.share_samples for m in members) != shares,
        reason=reason,
    )
