"""The global batch of a job's next plan. The trainer scales the learning rate to it (docs/adr/0006)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Infeasible, Split, balance

from heterotrain_planner.goodput import BatchChoice, choose_batch
from heterotrain_planner.perf.line import ASSUMED
from heterotrain_planner.perf.model import MemberModel
from heterotrain_planner.planning.evidence import MemberEvidence, cautious, pessimistic, settled, split_member
from heterotrain_planner.planning.fitting import MemberFits, fit_members

OPTIMISTIC_FIXED_PART = ASSUMED.ratio + ASSUMED.deviation
"""Fixed part of a member's time where only one size was observed: as large as plausible, to try a larger batch."""
LEAST_STEPS = 12
"""Steps of each member at its present speed before the batch changes; fewer would move it back and forth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The input of ``decide_batch``.

    Attributes:
        members: by rank, as for the shares.
        former: members that have left, as for the shares.
        base_samples: the batch that the user's learning rate was chosen for.
        least_samples: least batch (``adaptiveBatch.min``).
        most_samples: largest batch (``adaptiveBatch.max``).
        current_samples: the batch in force, ``None`` at the start.
        noise_samples: the measured noise scale phi of plain gradients, ``None`` while unknown.
        even: whether shares stay even whatever the speeds; a batch then takes as long as its slowest member.
    """

    members: tuple[MemberEvidence, ...]
    former: tuple[MemberEvidence, ...] = ()
    base_samples: int
    least_samples: int
    most_samples: int
    current_samples: int | None = None
    noise_samples: float | None = None
    even: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """The batch, with everything that led to it.

    Attributes:
        samples: the global batch.
        changed: whether the batch differs from the current one.
        choice: all candidates that were compared; ``None`` while speeds are unknown.
        reason: why, in one sentence.
    """

    samples: int
    changed: bool
    choice: BatchChoice | None
    reason: str


def decide_batch(request: BatchRequest, *, fits: MemberFits | None = None) -> BatchDecision | Infeasible:
    """Return the batch with the highest goodput; the current or the base batch while speed or noise is unclear.

    The batch grows step by step, because speeds and noise are extrapolated: each candidate is judged by shares near the
    observed shares of each member. Stable: with the decided batch as the current one, the same evidence decides it
    again.

    Args:
        request: members, limits and noise.
        fits: of the request's members, by a caller that needs them more than once; ``None`` fits them here.
    """
    fits = fit_members(request.members, request.former) if fits is None else fits
    models = fits.models()
    members = [
        split_member(m, _optimistic(x.compute, x))
        for m, x in zip(request.members, models, strict=True)
        if x.compute is not None
    ]
    wanted = request.base_samples if request.current_samples is None else request.current_samples
    start = min(max(wanted, request.least_samples), request.most_samples)
    if len(members) < len(request.members) or not members:
        return _decision(request, start, None, f"{start} samples, because no member's speed is known yet")
    unsure = [m.member for m, x in zip(request.members, models, strict=True) if not _known_well_enough(x)]
    if unsure:
        return _decision(
            request, start, None, f"{start} samples while the speed of {', '.join(unsure)} is being learned"
        )
    even = -(-request.base_samples // len(members))
    careful = [cautious(member, model, even) for member, model in zip(members, models, strict=True)]
    seen_enough = isinstance(balance(start, careful), Split)
    choice = choose_batch(
        careful if seen_enough else members,
        communication=fits.exchange.communication or CommunicationTime(),
        base_samples=request.base_samples,
        least_samples=request.least_samples,
        most_samples=request.most_samples if seen_enough else start,
        current_samples=request.current_samples,
        noise_samples=request.noise_samples,
        overhead_s=fits.exchange.overhead_s,
        even=request.even,
        hiccups=models[0].hiccups,
        beyond=[
            pessimistic(split_member(m, x.compute), x)
            for m, x in zip(request.members, models, strict=True)
            if seen_enough and x.compute is not None
        ],
    )
    return choice if isinstance(choice, Infeasible) else _decision(request, choice.samples, choice, choice.reason)


def _optimistic(compute: ComputeTime, model: MemberModel) -> ComputeTime:
    """Return a member's line with an optimistic fixed part where only one size was observed, otherwise unchanged.

    Even shares show no second size while the batch stays, so the assumed fixed part decides whether the batch ever
    moves. A larger batch is tried where it would pay with a large fixed part, and taken back if the fixed part turns
    out small.
    """
    size = model.largest_share_samples
    rate, fixed = compute.per_sample_s + compute.backward_per_sample_s, compute.fixed_s + compute.backward_fixed_s
    whole = rate * size + fixed
    if model.shapes > 1 or model.pooled or size <= 0 or fixed >= OPTIMISTIC_FIXED_PART * whole or rate <= 0:
        return compute
    slope, jump = (1 - OPTIMISTIC_FIXED_PART) * whole / size / rate, OPTIMISTIC_FIXED_PART * whole
    part = compute.backward_fixed_s / fixed if fixed > 0 else compute.backward_per_sample_s / rate
    return replace(
        compute,
        per_sample_s=slope * compute.per_sample_s,
        backward_per_sample_s=slope * compute.backward_per_sample_s,
        fixed_s=(1 - part) * jump,
        backward_fixed_s=part * jump,
    )


def _known_well_enough(model: MemberModel) -> bool:
    """Return whether the model suffices to judge a batch; it need not be perfect, because growth is bounded."""
    return settled(model) or model.steps_at_speed >= LEAST_STEPS


def _decision(request: BatchRequest, samples: int, choice: BatchChoice | None, reason: str) -> BatchDecision:
    return BatchDecision(samples=samples, changed=samples != request.current_samples, choice=choice, reason=reason)
