"""The global batch of a job's next plan; the learning rate that goes with it is the trainer's (docs/adr)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.goodput import BatchChoice, choose_batch
from heterotrain_core.perf.exchange import fit_exchange
from heterotrain_core.perf.line import ASSUMED
from heterotrain_core.perf.model import MemberModel
from heterotrain_core.planning.evidence import MemberEvidence, cautious, learned, settled, split_member
from heterotrain_core.split.balance import Infeasible, Split, balance

OPTIMISTIC_FIXED_PART = ASSUMED.ratio + ASSUMED.deviation
"""Of a member's time where it was seen at one size only: as large as it may well be, because only a larger batch will tell."""
LEAST_STEPS = 12
"""Of each member at its present speed, before the batch changes: a handful of noisy steps would send it to and fro."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The question.

    Attributes:
        members: by rank, as for the shares.
        former: members that have left, as for the shares.
        base_samples: the batch that the user's learning rate was chosen for.
        least_samples: least batch (``adaptiveBatch.min``).
        most_samples: largest batch (``adaptiveBatch.max``).
        current_samples: the batch in force, ``None`` at the start.
        noise_samples: phi as measured (of plain gradients: it says what a sample is worth), ``None`` while unknown.
        even: whether shares stay even whatever the speeds: a batch then takes as long as its slowest member.
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
    """The answer.

    Attributes:
        samples: the global batch.
        changed: whether the batch differs from the current one.
        choice: every candidate that was compared; ``None`` while speeds are unknown.
        reason: why, in one sentence.
    """

    samples: int
    changed: bool
    choice: BatchChoice | None
    reason: str


def decide_batch(request: BatchRequest) -> BatchDecision | Infeasible:
    """Return the batch of greatest goodput; the current or the base batch while speeds or noise are not known well.

    The batch grows step by step, because speeds and noise are extrapolated: each candidate is judged by shares that do
    not run far ahead of what was seen of each member. Stable: with the decided batch as the current one, the same
    evidence decides it again.
    """
    models = learned(request.members, request.former)
    members = [
        split_member(m, _optimistic(x.compute, x))
        for m, x in zip(request.members, models, strict=True)
        if x.compute is not None
    ]
    wanted = request.base_samples if request.current_samples is None else request.current_samples
    start = min(max(wanted, request.least_samples), request.most_samples)
    if len(members) < len(request.members) or not members:
        return _decision(request, start, None, f"{start} samples, because nobody's speed is known yet")
    unsure = [m.member for m, x in zip(request.members, models, strict=True) if not _told_enough(x)]
    if unsure:
        return _decision(
            request, start, None, f"{start} samples while the speed of {', '.join(unsure)} is being learned"
        )
    even = -(-request.base_samples // len(members))
    careful = [cautious(member, model, even) for member, model in zip(members, models, strict=True)]
    seen_enough = isinstance(balance(start, careful), Split)
    exchange = fit_exchange([o for member in request.members for o in member.observations])
    choice = choose_batch(
        careful if seen_enough else members,
        communication=exchange.communication or CommunicationTime(),
        base_samples=request.base_samples,
        least_samples=request.least_samples,
        most_samples=request.most_samples if seen_enough else start,
        current_samples=request.current_samples,
        noise_samples=request.noise_samples,
        overhead_s=exchange.overhead_s,
        even=request.even,
    )
    return choice if isinstance(choice, Infeasible) else _decision(request, choice.samples, choice, choice.reason)


def _optimistic(compute: ComputeTime, model: MemberModel) -> ComputeTime:
    """Return the line of a member that was seen at one size only as it is hoped to be, any other one as it is.

    Even shares show no second size while the batch stays, and what is assumed of the fixed part then decides whether it
    ever moves. A larger batch is tried where it would pay if the fixed part were large, and taken back if it is not.
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


def _told_enough(model: MemberModel) -> bool:
    """Tell whether a batch may be judged by the model: growth is bounded by what was seen, so it need not be perfect."""
    return settled(model) or model.steps_at_speed >= LEAST_STEPS


def _decision(request: BatchRequest, samples: int, choice: BatchChoice | None, reason: str) -> BatchDecision:
    return BatchDecision(samples=samples, changed=samples != request.current_samples, choice=choice, reason=reason)
