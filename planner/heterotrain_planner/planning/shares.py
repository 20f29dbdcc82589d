"""The shares of a job's next plan: from telemetry to models, from models to an optimal split, with a reason.

The first plan has even shares and probes; later shares follow the evidence. A member without evidence of its own (a
joiner) is taken to be like the others of its pool, or like the middle member. Deciding again on the same evidence
changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime, Prediction
from heterotrain_core.split.balance import Infeasible, Split, balance, evaluate
from heterotrain_core.split.member import SplitMember

from heterotrain_planner.perf.model import ExchangeModel, FitQuality, MemberModel, compute_s
from heterotrain_planner.planning.evidence import (
    MemberEvidence,
    cautious,
    near_shares,
    pessimistic,
    settled,
    split_member,
    trusted_samples,
    with_curves,
)
from heterotrain_planner.planning.fitting import MemberFits, fit_members
from heterotrain_planner.planning.measured_step import Expected, measured_ratio
from heterotrain_planner.planning.probe import PROBE_STEPS, Limits, probe_vectors
from heterotrain_planner.planning.significance import false_positive_gain
from heterotrain_planner.planning.variation import shrunk_variations
from heterotrain_planner.split.expected import (
    ExpectedSplit,
    balance_expected,
    efficiency_ceiling,
    expected_step_s,
)
from heterotrain_planner.split.straggler import Straggler, find_stragglers

STRAGGLER_GAIN_RATIO = 0.02
"""Least gain by which a member counts as a straggler: models are no more exact than this."""
_ALIKE = ComputeTime(per_sample_s=1.0, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)

__all__ = ["MemberEvidence", "SharesDecision", "SharesRequest", "decide_shares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesRequest:
    """The input of ``decide_shares``.

    Attributes:
        total_samples: the global batch.
        members: by rank.
        former: members that have left; they only show what a newcomer of their pool will be like.
        current_shares: shares of the plan in force, by rank of the same members; ``None`` when the members changed.
        least_gain_ratio: predicted gain in step time below which other shares are not worth a plan, e.g. 0.01. The gain
            also has to exceed the false-positive gain of the fits (``planning.significance``).
        trust_ratio: factor on that false-positive gain. 1 for shares in use; less for shares that were decided on less
            evidence and are still pending, because the newer evidence is better anyway.
        taken_back: the shares to return to, because the current ones are far slower than predicted; ``None`` for none.
        rebalance: ``False`` always keeps even shares, as a baseline.
        probe: whether shares may vary where a speed is still unclear. Where a boundary follows within some ten steps,
            the change of shares itself shows the speeds, and probes cost more than they show.
        least_members: no straggler is named beyond this number of remaining members.
    """

    total_samples: int
    members: tuple[MemberEvidence, ...]
    former: tuple[MemberEvidence, ...] = ()
    current_shares: tuple[int, ...] | None = None
    least_gain_ratio: float = 0.01
    trust_ratio: float = 1.0
    taken_back: tuple[int, ...] | None = None
    rebalance: bool = True
    probe: bool = True
    least_members: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesDecision:
    """The shares, with everything that led to them.

    Attributes:
        shares: samples of each member; they sum to the global batch.
        compute: learned time models as a plan carries them; ``None`` while unknown.
        probe: share vectors for the first steps of an epoch; empty when nothing has to be learned.
        prediction: expected step, efficiency and ceiling; ``None`` while a model is missing.
        gain_ratio: predicted part of a step that the shares save against the current ones, e.g. 0.1; 0 when the current
            shares stay, 1 when there are none that could stay.
        changed: whether the shares differ from the current ones. A probe that begins or ends does not change the
            shares, but is also a reason for a new revision.
        relearn: members whose speed changed.
        stragglers: members without which the rest would be faster.
        models: the fitted model of each member, with its quality and reason.
        exchange: the fitted exchange.
        reason: why, in one or two sentences.
    """

    shares: tuple[int, ...]
    compute: tuple[ComputeTime | None, ...]
    probe: tuple[tuple[int, ...], ...]
    prediction: Prediction | None
    gain_ratio: float
    changed: bool
    relearn: tuple[str, ...]
    stragglers: tuple[Straggler, ...]
    models: tuple[MemberModel, ...]
    exchange: ExchangeModel
    reason: str


def decide_shares(request: SharesRequest, *, fits: MemberFits | None = None) -> SharesDecision | Infeasible:
    """Return the shares that the evidence supports, or why the batch cannot be shared at all.

    Stable: with the decision's shares as current ones, the same evidence gives the same shares and ``changed`` False.

    Args:
        request: members, batch and current shares.
        fits: of the request's members, by a caller that needs them more than once; ``None`` fits them here.
    """
    fits = fit_members(request.members, request.former) if fits is None else fits
    return shares_of_models(request, fits.models(total_samples=request.total_samples), fits.exchange)


def shares_of_models(
    request: SharesRequest, models: Sequence[MemberModel], exchange: ExchangeModel
) -> SharesDecision | Infeasible:
    """Return the shares that these models of the members support; see ``decide_shares``.

    Args:
        request: members, batch and current shares.
        models: of each member.
        exchange: between them.
    """
    # 1. Check the limits: can these members share the batch at all?
    evidence = request.members
    even = balance(request.total_samples, [split_member(m, _ALIKE) for m in evidence])
    if isinstance(even, Infeasible):
        return even

    # 2. Bend the members' lines where their times are known to stray from them.
    communication = exchange.communication or CommunicationTime()
    members = [split_member(m, x.compute) for m, x in zip(evidence, models, strict=True) if x.compute is not None]
    known = len(members) == len(evidence)
    bent = with_curves(request.total_samples, members, models) if known else members

    # 3. Choose the shares: even, current or optimal ones.
    variations = shrunk_variations(models)
    hiccups = models[0].hiccups if models else NO_HICCUPS
    shares, gain, reason = _shares(request, models, bent, exchange, even.shares, variations=variations, hiccups=hiccups)
    final = evaluate(shares, bent, communication=communication) if known else None
    relearn = tuple(m.member for m, model in zip(evidence, models, strict=True) if model.drifted)
    if relearn:
        reason += f"; the speed of {', '.join(relearn)} changed"

    # 4. Vary the shares where a speed is still unclear.
    probe = _probe(request, shares, models) if request.probe else ()
    if probe:
        reason += f"; shares vary in an epoch's first {len(probe) * PROBE_STEPS} steps to learn speeds"

    # 5. Name members without which the rest would be faster.
    stragglers = _stragglers(request, members, communication) if known else ()
    if stragglers:
        reason += f"; {evidence[stragglers[0].member].member} holds up the others: {stragglers[0].reason}"
    return SharesDecision(
        shares=shares,
        compute=_planned_lines(models, final),
        probe=probe,
        prediction=_prediction(evidence, models, bent, final, exchange) if isinstance(final, Split) else None,
        gain_ratio=gain if shares != request.current_shares else 0.0,
        changed=shares != request.current_shares,
        relearn=relearn,
        stragglers=stragglers,
        models=tuple(models),
        exchange=exchange,
        reason=reason,
    )


def _stragglers(
    request: SharesRequest, members: Sequence[SplitMember], communication: CommunicationTime
) -> tuple[Straggler, ...]:
    proposed = find_stragglers(
        request.total_samples, members, communication=communication, least_members=request.least_members
    )
    return tuple(takewhile(lambda straggler: straggler.gain_ratio >= STRAGGLER_GAIN_RATIO, proposed))


def _planned_lines(models: Sequence[MemberModel], final: Split | Infeasible | None) -> tuple[ComputeTime | None, ...]:
    """Return the members' lines as a plan carries them: through the time curve at the planned share.

    Survivors of a loss, the allocation and the forecast extrapolate from there, and only have lines.
    """
    lines = [model.compute for model in models]
    if not isinstance(final, Split):
        return tuple(lines)
    for rank, (model, share, micro) in enumerate(zip(models, final.shares, final.micro_batches, strict=True)):
        line = model.compute
        if line is None or model.curve is None or share == 0:
            continue
        ratio = (final.own_s[rank] - line.update_s) / (compute_s(line, share, micro_batches=micro) - line.update_s)
        lines[rank] = replace(
            line,
            per_sample_s=ratio * line.per_sample_s,
            fixed_s=ratio * line.fixed_s,
            backward_per_sample_s=ratio * line.backward_per_sample_s,
            backward_fixed_s=ratio * line.backward_fixed_s,
        )
    return tuple(lines)


def _shares(
    request: SharesRequest,
    models: Sequence[MemberModel],
    members: Sequence[SplitMember],
    exchange: ExchangeModel,
    even: tuple[int, ...],
    *,
    variations: Sequence[float],
    hiccups: Hiccups,
) -> tuple[tuple[int, ...], float, str]:
    """Return even, current or optimal shares, the part of a step that they save against the current ones, and why."""
    if not request.rebalance:
        return even, 1.0, "even shares, because rebalancing is off"
    if len(members) < len(models):
        return _without_models(request, even)
    communication = exchange.communication or CommunicationTime()
    back, current = request.taken_back, request.current_shares
    usable = back is not None and sum(back) == request.total_samples
    if back is not None and usable and isinstance(evaluate(back, members, communication=communication), Split):
        return back, 1.0, "the shares before are back"
    found = _optimal(request, models, members, even, communication=communication, noise=(variations, hiccups))
    if isinstance(found, Infeasible):
        return even, 1.0, f"even shares, because the learned models cannot be used: {found.reason}"
    best = found.split
    known = sum(model.quality is FitQuality.OK for model in models)
    sure = f"speeds of {known} of {len(models)} members are well known"
    why = best.reason + _moved(found)
    if current is None:
        return best.shares, 1.0, f"optimal shares for these members ({sure}): {why}"
    if sum(current) != request.total_samples:
        instead = f"{request.total_samples} instead of {sum(current)} samples"
        return best.shares, 1.0, f"optimal shares for {instead} ({sure})"
    now = evaluate(current, members, communication=communication)
    if isinstance(now, Infeasible):
        return best.shares, 1.0, f"optimal shares ({sure}); the current ones cannot stay: {now.reason}"
    gain = _gain(found, now, variations, hiccups, exchange.overhead_s)
    needed = max(request.least_gain_ratio, request.trust_ratio * false_positive_gain(models, now))
    if gain > 0 and gain >= needed:
        return best.shares, gain, f"optimal shares save {gain:.1%} of a step ({sure}): {why}"
    limit = "a change waits until each member is measured"
    if math.isfinite(needed):
        limit = f"a change has to save {needed:.1%}"
    save = f"the optimal ones would save {max(gain, 0.0):.1%} of a step"
    return current, 0.0, f"the current shares stay ({sure}): {save}, {limit}"


def _without_models(request: SharesRequest, even: tuple[int, ...]) -> tuple[tuple[int, ...], float, str]:
    """Return the shares while some speed is unknown: missing telemetry is not a reason to give up good shares."""
    current = request.current_shares
    if current is not None and sum(current) == request.total_samples:
        unit = [split_member(m, _ALIKE) for m in request.members]
        if isinstance(evaluate(current, unit), Split):
            return current, 0.0, "the current shares stay, because no member's speed is known"
    return even, 1.0, "even shares, because no member's speed is known yet"


def _optimal(
    request: SharesRequest,
    models: Sequence[MemberModel],
    members: Sequence[SplitMember],
    even: tuple[int, ...],
    *,
    communication: CommunicationTime,
    noise: tuple[Sequence[float], Hiccups],
) -> ExpectedSplit | Infeasible:
    """Return the shares with the shortest expected step, by models that are cautious beyond what was measured."""
    if request.total_samples > trusted_samples(members, models):
        careful = [pessimistic(member, model) for member, model in zip(members, models, strict=True)]
    else:
        careful = [cautious(member, model, share) for member, model, share in zip(members, models, even, strict=True)]
    # Lines otherwise: without caps, all shares up to the batch would have to be tabulated.
    lines = [replace(m, compute=x.compute or _ALIKE) for m, x in zip(members, models, strict=True)]
    variations, hiccups = noise
    for each in (near_shares(careful, request.current_shares), lines):
        found = balance_expected(request.total_samples, each, variations, communication=communication, hiccups=hiccups)
        if not isinstance(found, Infeasible):
            break
    return found


def _gain(found: ExpectedSplit, now: Split, variations: Sequence[float], hiccups: Hiccups, overhead_s: float) -> float:
    """Return the part of a step that the found shares save.

    Where they are balanced, without noise: then it shows by how much the slowest member is off, as the threshold
    assumes. Noise hides small differences in the expected step.
    """
    if found.expected_s == found.balanced_s:
        return 1 - (found.split.step_s + overhead_s) / (now.step_s + overhead_s)
    return 1 - (found.expected_s + overhead_s) / (expected_step_s(now, variations, hiccups=hiccups) + overhead_s)


def _moved(found: ExpectedSplit) -> str:
    """Return what fewer samples for noisy members save, in a clause; empty where the shares are the balanced ones."""
    if found.expected_s == found.balanced_s:
        return ""
    return f"; fewer samples for noisy members save {1 - found.expected_s / found.balanced_s:.1%}"


def _prediction(
    evidence: Sequence[MemberEvidence],
    models: Sequence[MemberModel],
    members: Sequence[SplitMember],
    split: Split,
    exchange: ExchangeModel,
) -> Prediction:
    """Return the expected step: the mean of the maximum over noisy members, plus the training loop's own overhead.

    It is as much longer or shorter than the models say as the steps were so far, and so is the ceiling.
    """
    variations, hiccups = shrunk_variations(models), models[0].hiccups
    communication = exchange.communication or CommunicationTime()

    def step_s(division: Split) -> float:
        return expected_step_s(division, variations, hiccups=hiccups) + exchange.overhead_s

    def expected(shares: tuple[int, ...]) -> Expected | None:
        division = evaluate(shares, members, communication=communication) if sum(shares) == sum(split.shares) else None
        return Expected(division, step_s(division)) if isinstance(division, Split) else None

    steady = min(model.steps_at_speed for model in models)
    ratio = measured_ratio([member.observations for member in evidence], expected, steps=steady)
    whole_s = ratio * step_s(split)
    busy = [rank for rank, share in enumerate(split.shares) if share > 0]
    own_s = sum(split.shares) / split.solo_samples_per_s
    ceiling = efficiency_ceiling(
        [variations[rank] for rank in busy],
        [split.shares[rank] / split.own_s[rank] for rank in busy],
        hiccups=hiccups.relative_to(own_s),
    )
    return Prediction(
        step_s=whole_s,
        efficiency=sum(split.shares) / whole_s / split.solo_samples_per_s,
        efficiency_ceiling=min(1.0, ceiling / ratio),
        bindings=split.bindings,
        hiccups=hiccups,
        own_s=own_s if hiccups.rate else 0.0,
    )


def _probe(
    request: SharesRequest, shares: tuple[int, ...], models: Sequence[MemberModel]
) -> tuple[tuple[int, ...], ...]:
    if not request.rebalance or len(shares) < 2:  # noqa: PLR2004  # one member's share is the batch
        return ()
    learners = [rank for rank, model in enumerate(models) if shares[rank] > 0 and not settled(model)]
    learners.sort(key=lambda rank: (request.members[rank].pool, rank))
    limits = [
        Limits(least=m.floor_samples, most=m.cap_samples, granularity=m.granularity_samples) for m in request.members
    ]
    return probe_vectors(shares, limits, learners) if learners else ()
